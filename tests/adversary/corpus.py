"""Every kind of file that Unskew reads, made honestly, with the commands and functions that read it.

A reader takes the place of a file and returns what it understood, as a short text that is equal for equal meanings. It
raises `Refused` for a sentence and anything else for what should not happen.
"""

import contextlib
import gzip
import io
import itertools
import json
import os
import pickle
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from PIL import Image

from adversary import archives, federation as honest, forging, laws, mutations, reading
from adversary.federation import Federation, collected, done
from adversary.reading import Wrong, command, function, is_json, moved, tensors_of
from helpers.commands import blobs, tiny

FORMS = ("class", "pooled", "diagonal", "none")
PRECISIONS = ("float64", "float32", "bfloat16", "int16")
TABLE_NET = """
from torch import nn

def build():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
"""


class Reader(NamedTuple):
    name: str
    read: Callable[[Path], str]
    trusts: bool = False  # whether it was told to run the code that comes with the file


class Original(NamedTuple):
    """A file as it should be."""

    kind: str  # a row of the table of results
    path: Path  # where it lies among the files of the corpus
    mutate: mutations.Structured
    readers: tuple[Reader, ...]
    sealed: bool = False  # whether a change that is not resealed must be refused, or mean the same
    beside: tuple[Path, ...] = ()  # files that are copied to where the mutant is put


class Corpus(NamedTuple):
    federation: Federation
    originals: list[Original]
    accuracy: float  # of the head that the honest files give


# ---------------------------------------------------------------------------------------------- the corpus


def made(folder: Path) -> Corpus:
    """Make all files, in a few seconds."""
    fed = honest.made(folder / "federation")
    sent = folder / "sent"
    sent.mkdir()
    sites = [collected(fed, sent / f"site_{number}.stats", number) for number in range(honest.SITES)]
    test = np.load(fed.folder / "test.npz")
    judge = _Judge(fed, sites, test["x"], test["y"])
    accuracy = judge.accuracy(judge.calibrated(sites))
    judge.honest = accuracy
    originals = [
        *_statistics(fed, folder, judge),
        *_conversation(fed, folder, sites),
        *_weights(fed, folder, sites),
        *_tables(folder),
        *_images(fed, folder),
        *_data_sets(folder),
        *_runs(folder),
    ]
    return Corpus(fed, originals, accuracy)


class _Judge:
    """Calibrates with a site's file among honest ones, and says what that does to the accuracy."""

    def __init__(self, fed: Federation, sites: list[Path], x: np.ndarray, y: np.ndarray) -> None:
        self.fed, self.sites, self.labels, self.honest = fed, sites, y, 0.0
        weights = forging.read((fed.folder / "global.safetensors").read_bytes())
        hidden = x.reshape(len(x), -1) / 255 @ weights.array("1.weight").T + weights.array("1.bias")
        self.features = np.maximum(hidden, 0)

    def calibrated(self, files: Iterable[Path]) -> Path:
        done("calibrate", *self.fed.task, "--stats", *files, "--out", "calibrated.safetensors", "--force")
        return Path("calibrated.safetensors")

    def accuracy(self, weights: Path) -> float:
        """Of a calibrated model on the test images, in %, without Unskew's code."""
        head = forging.read(weights.read_bytes())
        logits = self.features @ head.array("3.weight").T + head.array("3.bias")
        return 100 * float((logits.argmax(1) == self.labels).mean())

    def others(self, path: Path) -> list[Path]:
        """The files of the other sites: of site 0 those of the class form are, of site 1 the pooled ones."""
        own = FORMS.index(path.name.partition("-")[0])
        return [site for number, site in enumerate(self.sites) if number != own]

    def read(self, path: Path) -> str:
        """Calibrate with this file in the place of its site's."""
        out = Path("calibrated.safetensors")
        answer = []

        def meaning() -> str:
            return tensors_of(out)

        with _listening(answer):
            text = command(
                "calibrate",
                *self.fed.task,
                "--stats",
                path,
                *self.others(path),
                "--out",
                out,
                "--force",
                meaning=meaning,
            )
        lost = self.honest - self.accuracy(out)
        if lost > 2 and path.name not in "".join(answer):
            raise Wrong(f"the accuracy falls by {lost:.1f} points, and {path.name} is not named")
        return text


@contextlib.contextmanager
def _listening(heard: list[str]) -> Any:
    """Keep what commands say."""
    real = reading.unskew

    def heard_by(*arguments: object) -> Any:
        answer = real(*arguments)
        heard.append(answer.err + "".join(line for line in answer.out.splitlines() if "beware" in line))
        return answer

    with mock.patch.object(reading, "unskew", heard_by):
        yield


def _lawful(read: Callable[[Path], str], path: Path, moments: bool = False) -> str:
    """Read a file of statistics; one that is accepted must keep the laws that the documents state."""
    text = read(path)
    raw = path.read_bytes()
    if problem := laws.broken(raw) or (laws.impossible(raw) if moments else None):
        raise Wrong(problem)
    return text


def _inspected(path: Path) -> str:
    """What `inspect --json` says; impossible moments must be among its warnings."""
    text = command("inspect", path, "--json")
    problem = laws.impossible(path.read_bytes())
    if problem and path.name not in json.dumps(json.loads(text).get("warnings", [])):
        raise Wrong(f"{problem}, and inspect does not warn")
    return is_json(text)


def _statistics(fed: Federation, folder: Path, judge: _Judge) -> list[Original]:
    from unskew import FeatureStats

    def stats_of(path: Path) -> object:
        stats = FeatureStats.load(path)
        return [
            *stats.tensors,
            *([] if stats.held_out is None else stats.held_out.tensors),
            stats.transform,
            stats.form,
        ]

    found = []
    for number, form in enumerate(FORMS):
        for precision in PRECISIONS:
            for held in (True, False) if precision in ("float64", "int16") else (True,):
                path = folder / f"{form}-{precision}-{held}.stats"
                if held:
                    collected(fed, path, number, form, precision)
                else:
                    told = ["--labels", fed.folder / "names.txt", "--form", form, "--precision", precision]
                    done("stats", *fed.model, *told, "--data", fed.site(number), "--out", path)
                readers = [
                    Reader("FeatureStats.load", partial(_lawful, partial(function, stats_of))),
                    Reader("inspect --json", partial(_lawful, _inspected)),
                    Reader("inspect", lambda path: command("inspect", *judge.sites[4:6], path, meaning=str)),
                ]
                if held and form in ("class", "pooled"):
                    readers.append(Reader("calibrate", partial(_lawful, judge.read, moments=True)))
                found.append(Original(f"statistics, {form}", path, mutations.safetensors, tuple(readers), sealed=True))
    return found


def _conversation(fed: Federation, folder: Path, sites: list[Path]) -> list[Original]:
    """Candidate heads, answers to them, the task, names of classes, a prior."""
    heads, answer = folder / "heads.safetensors", folder / "site_0.answer"
    done("calibrate", *fed.task, "--stats", *sites, "--propose", heads)
    others = []
    for number in range(3):
        out = folder / f"site_{number}.answer"
        asked = ["--heads", heads, "--stats", sites[number]]
        done("evaluate", *fed.task, "--data", fed.site(number), *asked, "--out", out)
        others.append(out)
    out = Path("validated.safetensors")

    def validated(heads: Path, answer: Path) -> str:
        arguments = ["--heads", heads, "--validate", answer, *others[1:], "--out", out, "--force"]
        return command("calibrate", *fed.task, "--stats", *sites, *arguments, meaning=lambda: tensors_of(out))

    def scored(path: Path) -> str:
        return is_json(command("evaluate", *fed.task, "--data", fed.site(1), "--heads", path, "--json"))

    def collect(*options: object) -> str:
        arguments = ["--data", fed.site(1), "--out", "new.stats", "--force"]
        return command("stats", *options, *arguments, meaning=lambda: tensors_of(Path("new.stats")))

    prior = folder / "prior.txt"
    prior.write_text("".join(f"{number + 1}\n" for number in range(10)))
    task = fed.folder / "task.toml"
    beside = (fed.folder / "net.py", fed.folder / "global.safetensors")
    return [
        Original("heads", heads, mutations.safetensors, (
            Reader("evaluate --heads", scored),
            Reader("calibrate --heads", lambda path: validated(path, answer)),
        ), sealed=True),
        Original("answers", answer, mutations.answer, (
            Reader("calibrate --validate", lambda path: validated(heads, path)),
        ), sealed=True),
        Original("task", task, mutations.toml, (
            Reader("stats --task", lambda path: collect("--task", path, "--trust"), trusts=True),
            Reader("stats --task, no trust", lambda path: collect("--task", path)),
            Reader("calibrate --task", lambda path: command(
                "calibrate", "--task", path, "--trust", "--stats", *sites, "--out", out, "--force",
                meaning=lambda: tensors_of(out)), trusts=True),
        ), beside=beside),
        Original("names of classes", fed.folder / "names.txt", mutations.lines, (
            Reader("stats --labels", lambda path: collect(*fed.model, "--labels", path)),
        )),
        Original("prior", prior, mutations.lines, (
            Reader("calibrate --prior", lambda path: command(
                "calibrate", *fed.task, "--stats", *sites, "--prior", path, "--out", out, "--force",
                meaning=lambda: tensors_of(out))),
        )),
    ]  # fmt: skip


def _weights(fed: Federation, folder: Path, sites: list[Path]) -> list[Original]:
    """Weights, calibrated models."""
    from unskew.models.weights import read_weights

    calibrated = folder / "calibrated.safetensors"
    done("calibrate", *fed.task, "--stats", *sites, "--out", calibrated)
    model, out = fed.model[:2], Path("other.safetensors")

    def evaluate(path: Path) -> str:
        return is_json(command("evaluate", *model, "--weights", path, "--data", fed.folder / "test.npz", "--json"))

    def calibrate(path: Path) -> str:
        """With other weights than the statistics were collected with."""
        arguments = ["--stats", *sites, "--calibrator", "ffc", "--out", out, "--force"]
        return command("calibrate", *model, "--weights", path, *arguments, meaning=lambda: tensors_of(out))

    readers = (Reader("read_weights", partial(function, read_weights)), Reader("evaluate --weights", evaluate))
    strict = Reader("calibrate --weights", calibrate)
    return [
        Original("weights, safetensors", fed.folder / "global.safetensors", mutations.safetensors, (*readers, strict)),
        Original("weights, safetensors", calibrated, mutations.safetensors, readers),
        Original("weights, torch.save", fed.folder / "global.pt", archives.weights_pt, (*readers, strict)),
    ]


def _tables(folder: Path) -> list[Original]:
    """Data in tables and arrays."""
    (folder / "table_net.py").write_text(TABLE_NET)
    draw = np.random.default_rng(0)
    table = folder / "site.csv"
    rows = [f"{','.join(f'{value:.3f}' for value in draw.normal(size=4))},{'abc'[n % 3]}" for n in range(40)]
    table.write_text("\n".join(["u,v,w,x,label", *rows, ""]))
    names = folder / "abc.txt"
    names.write_text("a\nb\nc\n")

    def collect(path: Path) -> str:
        arguments = ["--labels", names, "--data", path, "--out", "table.stats", "--force"]
        command_of = ["stats", "--model", f"{folder / 'table_net.py'}:build", *arguments]
        return command(*command_of, meaning=lambda: tensors_of(Path("table.stats")))

    return [Original("tables", table, mutations.lines, (Reader("stats --data", collect),))]


def _images(fed: Federation, folder: Path) -> list[Original]:
    """Images in class folders, and arrays of them."""
    from unskew import load

    draw = np.random.default_rng(0)
    root = folder / "photos"
    for name in ("ant", "bee"):
        (root / name).mkdir(parents=True)
        for number in range(3):
            Image.fromarray(draw.integers(0, 256, (8, 8, 3), np.uint8)).save(root / name / f"{number}.png")
    jpeg, gif = root / "ant" / "9.jpg", root / "bee" / "8.gif"
    for path in (jpeg, gif):
        Image.fromarray(draw.integers(0, 256, (8, 8), np.uint8)).save(path)
    arrays = blobs(folder / "blobs.npz")

    def collect(data: Path) -> str:
        arguments = ["--data", data, "--out", "images.stats", "--force", "--image-size", 8, "--channels", 1]
        return command(
            "stats", *fed.model, "--classes", 2, *arguments, meaning=lambda: tensors_of(Path("images.stats"))
        )

    def among_others(path: Path, read: Callable[[Path], str]) -> str:
        """The mutant in the place of an image of a folder."""
        shutil.rmtree("photos", ignore_errors=True)
        shutil.copytree(root, "photos")
        moved(path, Path("photos/ant") / path.name)
        return read(Path("photos"))

    def load_folder(path: Path) -> object:
        return load(path, Path("cache"), size=8).x

    readers = (
        Reader("stats --data", partial(among_others, read=collect)),
        Reader("load", partial(among_others, read=partial(function, load_folder))),
    )

    def collect_arrays(path: Path) -> str:
        arguments = ["--data", path, "--out", "arrays.stats", "--force"]
        return command("stats", *fed.model, *arguments, meaning=lambda: tensors_of(Path("arrays.stats")))

    return [
        Original("images", root / "ant" / "0.png", archives.png, readers),
        Original("images", jpeg, mutations.damaged, readers),
        Original("images", gif, mutations.damaged, readers),
        Original("arrays", fed.site(0), archives.npz, (Reader("stats --data", collect_arrays),)),
        Original("arrays", arrays, archives.npz, (Reader("load", partial(function, lambda path: load(path).x)),)),
    ]


def _data_sets(folder: Path) -> list[Original]:
    """The archives of known data sets, small."""
    from unskew import load

    def sets(name: str, place: str) -> Callable[[Path], object]:
        def read(path: Path) -> object:
            home = Path("sets")
            shutil.rmtree(home, ignore_errors=True)
            target = home / place
            target.parent.mkdir(parents=True)
            for other in (folder / place).parent.iterdir():
                shutil.copy(other, target.parent)
            moved(path, target)
            data = load(name, home, download=False)
            return data.x, data.y

        return read

    def original(kind: str, name: str, file: str, mutate: mutations.Structured) -> Original:
        place = f"{name}/{file}"
        return Original(kind, folder / place, mutate, (Reader("load", partial(function, sets(name, place))),))

    draw = np.random.default_rng(0)
    fashion = folder / "fashion-mnist"
    fashion.mkdir()
    for start, count in (("train", 20), ("t10k", 10)):
        x, y = draw.integers(0, 256, (count, 28, 28), np.uint8), (np.arange(count) % 10).astype(np.uint8)
        (fashion / f"{start}-images-idx3-ubyte.gz").write_bytes(
            gzip.compress(struct.pack(">4BIII", 0, 0, 8, 3, count, 28, 28) + x.tobytes())
        )
        (fashion / f"{start}-labels-idx1-ubyte.gz").write_bytes(
            gzip.compress(struct.pack(">4BI", 0, 0, 8, 1, count) + y.tobytes())
        )
    batch = {b"data": draw.integers(0, 256, (10, 3072), np.uint8), b"labels": list(range(10))}
    members = {f"cifar-10-batches-py/data_batch_{number}": pickle.dumps(batch, 2) for number in range(1, 6)}
    members |= {"cifar-10-batches-py/test_batch": pickle.dumps(batch, 2)}
    members |= {"cifar-10-batches-py/batches.meta": pickle.dumps({b"label_names": [b"%d" % n for n in range(10)]}, 2)}
    _tar(folder / "cifar10" / "cifar-10-python.tar.gz", members)
    picture = io.BytesIO()
    Image.fromarray(batch[b"data"][0].reshape(32, 32, 3)).save(picture, "png")
    classes = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    pictures = {f"{part}/{name}/0.png": picture.getvalue() for part in ("train", "test") for name in classes}
    _tar(folder / "cinic10" / "CINIC-10.tar.gz", pictures)
    tiny_home = folder / "tiny-imagenet"
    tiny_home.mkdir()
    with zipfile.ZipFile(tiny_home / "tiny-imagenet-200.zip", "w") as archive:
        start = "tiny-imagenet-200/"
        archive.writestr(start + "wnids.txt", "n1\nn2\n")
        archive.writestr(start + "words.txt", "n1\tant\nn2\tbee\n")
        archive.writestr(start + "val/val_annotations.txt", "a.png\tn1\nb.png\tn2\n")
        for name in ("val/images/a.png", "val/images/b.png", "train/n1/images/1.png", "train/n2/images/2.png"):
            archive.writestr(start + name, picture.getvalue())
    change = archives.gzipped(archives.tar)
    return [
        original("idx", "fashion-mnist", "train-images-idx3-ubyte.gz", archives.gzipped(archives.idx)),
        original("idx", "fashion-mnist", "t10k-labels-idx1-ubyte.gz", archives.gzipped(archives.idx)),
        original("archives", "cifar10", "cifar-10-python.tar.gz", change),
        original("archives", "cinic10", "CINIC-10.tar.gz", change),
        original("archives", "tiny-imagenet", "tiny-imagenet-200.zip", archives.zipped_pictures),
    ]


def _tar(path: Path, members: dict[str, bytes]) -> None:
    path.parent.mkdir()
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def _runs(folder: Path) -> list[Original]:
    """The files of a run's folder, and what is kept beside the data sets."""
    import unskew as library
    from unskew import Experiment, load_model
    from unskew.experiments.experiment import read_toml
    from unskew.training.engines import auto

    data = blobs(folder / "run.npz")
    whole, half = folder / "whole", folder / "half"
    done("run", *tiny(data, rounds=2, calibrate="ffc,ffc:transform=unit"), "--out", whole)
    experiment = Experiment(
        data=str(data),
        clients=4,
        alpha=1.0,
        rounds=2,
        epochs=1,
        batch=8,
        engine="sequential",
        calibrate="ffc",
        threads=1,
    )
    with contextlib.closing(library.run(experiment, half)) as running:
        list(itertools.islice(running, 2))  # the start and the first round
    config = folder / "experiment.toml"
    config.write_text('data = "digits"\nclients = 4\nalpha = 1.0\nrounds = 3\nmethod = "fedavg"\ncalibrate = "ffc"\n')

    def resumed(path: Path, name: str) -> str:
        run = Path("run")
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(half, run)
        moved(path, run / name)
        return command("run", "--resume", "--out", run, meaning=lambda: tensors_of(run / "model.safetensors"))

    def speeds(path: Path) -> str:
        home = Path("speeds")
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        moved(path, home / "speeds.json")
        measured = {"sequential": 1.0, "batched": 2.0, "workers": 3.0}
        with (
            mock.patch.dict(os.environ, {"UNSKEW_DATA": str(home)}),
            mock.patch("unskew.training.engines.auto.measured", return_value=measured),
            mock.patch("unskew.training.engines.auto.WORTH", 1),
        ):
            return function(lambda _: auto.choose_engine(training).engine, path)

    training = _training(data)
    memory = folder / "speeds.json"
    memory.write_text(json.dumps({"0123456789abcdef": {"sequential": 10.5, "batched": 20.0}}))
    models = whole / "model.safetensors", next(whole.glob("calibrated-*unit*"))
    model = Reader("load_model", partial(function, load_model))
    files = {"experiment.json": (mutations.json_text, False), "records.jsonl": (mutations.json_lines, False),
             "checkpoint.safetensors": (mutations.safetensors, True)}  # fmt: skip
    return [
        *(Original(f"runs: {name}", half / name, mutate, (Reader("run --resume", partial(resumed, name=name)),), sealed)
          for name, (mutate, sealed) in files.items()),
        *(Original("runs: models", path, mutations.safetensors, (model,), True) for path in models),
        Original("runs: configuration", config, mutations.toml, (
            Reader("read_toml", partial(function, lambda path: Experiment.of(read_toml(path), str(path)))),)),
        Original("speeds.json", memory, mutations.json_text, (Reader("auto.choose_engine", speeds),)),
    ]  # fmt: skip


def _training(data: Path) -> Any:
    import unskew as library

    blob = library.load(data)
    federation = library.federate(blob, library.iid(clients=4))
    model = library.build("small-cnn", blob.classes, blob.channels, blob.size)
    return library.Training(model, federation, library.fedavg(), rounds=3)
