"""A site that lies: what it may send, and what that does to the model of all.

Ten sites hold the digits. The liar has read the file format and computes what it sends in NumPy; seals fit. Each attack
goes through `unskew calibrate` as a server would run it. It is stopped if the command refuses, or names the file in a
note; else the accuracy says what it cost. `UNSEEN` lists what the documents say that no check can see.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from adversary import forging
from adversary.federation import CLASSES, SITES, Federation, collected
from helpers.commands import unskew

COST = 2.0  # points of accuracy that an attack may cost without being named
UNSEEN = {  # see SECURITY.md: what no check can tell from an honest site
    "a fifth of its labels are random": "labels that are wrong in part look like a hard site",
    "its features are shifted a little": "another camera does that",
    "six of ten sites swap two classes": "whoever has the majority is the norm",
    "means moved 70 % of the way to the next class": "a lie within the bounds",
    "its own data x 2.2": "a lie within the bounds",
    "counted 3 times": "nobody else knows how many examples a site has",
    "counted 20 times": "nobody else knows how many examples a site has",
}


class Features(NamedTuple):
    """What a site has: features, labels, and which of them it holds out."""

    z: np.ndarray
    y: np.ndarray
    held: np.ndarray


class Outcome(NamedTuple):
    """What became of an attack."""

    attack: str
    ended: str  # "refused", "named" or "accepted"
    accuracy: float | None
    lost: float
    said: str

    @property
    def harmful(self) -> bool:
        """Accepted in silence, at a cost that no document foretells."""
        return self.ended == "accepted" and self.lost > COST and self.attack not in UNSEEN


class Scene:
    """Honest files, and the means to forge others."""

    def __init__(self, federation: Federation, folder: Path) -> None:
        self.federation, self.folder = federation, folder
        folder.mkdir(exist_ok=True)
        self.files = [collected(federation, folder / f"site_{number}.stats", number) for number in range(SITES)]
        weights = forging.read((federation.folder / "global.safetensors").read_bytes())
        self.weight, self.bias = weights.array("1.weight"), weights.array("1.bias")
        test = np.load(federation.folder / "test.npz")
        self.test = self.features(test["x"] / 255.0), test["y"]
        sizes = [forging.read(path.read_bytes()).get("examples") for path in self.files]
        self.liar = int(np.argmax(sizes))  # the largest site
        outcome = self.outcome("nobody lies", self.files)
        assert outcome.accuracy is not None, outcome.said
        self.honest = outcome.accuracy

    def features(self, x: np.ndarray) -> np.ndarray:
        """What the network makes of images."""
        return np.maximum(x.reshape(len(x), -1) @ self.weight.T.astype(float) + self.bias, 0)

    def data(self, site: int, pixels: float = 1 / 255) -> Features:
        """What a site has; a fifth is held out."""
        held = np.load(self.federation.site(site))
        x, y = held["x"] * pixels, held["y"]
        return Features(self.features(x), y, np.arange(len(y)) % 5 == 0)

    def file(self, site: int | None = None) -> forging.Forgery:
        """A site's honest file, to be changed; the liar's own unless another is named."""
        return forging.read(self.files[self.liar if site is None else site].read_bytes())

    def sent(self, *forged: forging.Forgery, instead: tuple[int, ...] | None = None) -> list[Path]:
        """All files, with these instead of some sites', or of the liar's."""
        instead = (self.liar,) if instead is None else instead
        lies = []
        for number, forgery in enumerate(forged):
            path = self.folder / f"liar_{number}.stats"
            path.write_bytes(forging.written(forging.resealed(forgery)))
            lies.append(path)
        return [*(path for number, path in enumerate(self.files) if number not in instead), *lies]

    def outcome(self, name: str, files: list[Path], *options: object, liars: str = "liar_") -> Outcome:
        """Calibrate with these files."""
        out = self.folder / "calibrated.safetensors"
        answer = unskew("calibrate", *self.federation.task, "--stats", *files, "--out", out, "--force", *options)
        if answer.code in (1, 2):
            return Outcome(name, "refused", None, 0.0, answer.err)
        if answer.code != 0:
            raise RuntimeError(f"{name}: exit {answer.code}: {answer.err}")
        accuracy = self.accuracy(out)
        lost = getattr(self, "honest", accuracy) - accuracy
        named = liars in answer.err + answer.out
        return Outcome(name, "named" if named else "accepted", accuracy, lost, answer.err)

    def accuracy(self, weights: Path) -> float:
        """Of a model on the test images, in %, without Unskew's code."""
        head = forging.read(weights.read_bytes())
        logits = self.test[0] @ head.array("3.weight").T + head.array("3.bias")
        return 100 * float((logits.argmax(1) == self.test[1]).mean())


def told(file: forging.Forgery, data: Features, copies: float = 1.0) -> forging.Forgery:
    """A file in the pooled form, float64, that tells of these features; counted so many times."""
    file = copy.deepcopy(file)
    for start, rows in (("", slice(None)), ("held_out.", data.held)):
        z, y = data.z[rows], data.y[rows]
        count = np.bincount(y, minlength=CLASSES).astype(float)
        mean = np.stack(
            [z[y == label].mean(0) if (y == label).any() else np.zeros(z.shape[1]) for label in range(CLASSES)]
        )
        around = z - mean[y]
        file.put(f"{start}count", np.round(count * copies))
        file.put(f"{start}mean", mean)
        file.put(f"{start}scatter", (around.T @ around)[np.triu_indices(z.shape[1])] * copies)
        file.set("held_out" if start else "examples", int(np.round(count * copies).sum()))
    return file


def scaled(data: Features, factor: float) -> Features:
    return data._replace(z=data.z * factor)


def swapped(data: Features) -> Features:
    """With the two classes of which it has most in each other's place."""
    *_, one, other = np.bincount(data.y, minlength=CLASSES).argsort(kind="stable")
    y = np.where(data.y == one, other, np.where(data.y == other, one, data.y))
    return data._replace(y=y)


def one_example(scene: Scene, z: float | None = None) -> Features:
    """A single example, which is not held out."""
    data = scene.data(scene.liar)
    first = data.z[:1] if z is None else np.full_like(data.z[:1], z)
    return Features(first, data.y[:1], np.array([False]))


# ---------------------------------------------------------------------------------------------- attacks on statistics

Files = list[Path]
ATTACKS: dict[str, Callable[[Scene], Files]] = {}


def attack(name: str) -> Callable[[Callable[[Scene], Files]], Callable[[Scene], Files]]:
    """Keep an attack under a name."""

    def keep(made: Callable[[Scene], Files]) -> Callable[[Scene], Files]:
        ATTACKS[name] = made
        return made

    return keep


def of_data(name: str, change: Callable[[Features], Features], copies: float = 1.0) -> None:
    """An attack that changes what the site has."""
    ATTACKS[name] = lambda scene: scene.sent(told(scene.file(), change(scene.data(scene.liar)), copies))


def of_header(name: str, **fields: object) -> None:
    """An attack that changes what stands in the header."""

    def made(scene: Scene) -> Files:
        file = scene.file()
        for field, value in fields.items():
            file.set(field, value)
        return scene.sent(file)

    ATTACKS[name] = made


def _turned(data: Features) -> Features:
    draw = np.random.default_rng(0)
    return data._replace(z=data.z @ np.linalg.qr(draw.normal(size=(data.z.shape[1],) * 2))[0])


def _random(data: Features, share: float) -> Features:
    draw = np.random.default_rng(0)
    chosen = draw.random(len(data.y)) < share
    return data._replace(y=np.where(chosen, draw.integers(0, CLASSES, len(data.y)), data.y))


def _towards_next(data: Features) -> Features:
    """Each class moved towards the next one that the site has: what bounds on means just let pass."""
    there = np.unique(data.y)
    mean = {label: data.z[data.y == label].mean(0) for label in there}
    following = dict(zip(there, np.roll(there, -1), strict=True))
    return data._replace(z=data.z + 0.7 * np.stack([mean[following[label]] - mean[label] for label in data.y]))


of_data("its own data x 1e13", lambda data: scaled(data, 1e13))
of_data("its own data x 1000", lambda data: scaled(data, 1000))
of_data("its own data x 10", lambda data: scaled(data, 10))
of_data("its own data x 3", lambda data: scaled(data, 3))
of_data("its own data x 0", lambda data: scaled(data, 0))
of_data("its own data negated", lambda data: scaled(data, -1))
of_data("its features are shifted a little", lambda data: data._replace(z=data.z + 0.3))
of_data("its features are shifted far", lambda data: data._replace(z=data.z + 100))
of_data("its features are turned", _turned)
of_data("its features are in another order", lambda data: data._replace(z=data.z[:, ::-1]))
of_data("two classes swapped", swapped)
of_data("all classes shifted by one", lambda data: data._replace(y=(data.y + 1) % CLASSES))
of_data("all labels random", lambda data: _random(data, 1.0))
of_data("a fifth of its labels are random", lambda data: _random(data, 0.2))
of_data("all its examples are of one class", lambda data: data._replace(y=np.zeros_like(data.y)))
of_data("its own data x 2.2", lambda data: scaled(data, 2.2))
of_data("means moved 70 % of the way to the next class", _towards_next)
of_data("counted 3 times", lambda data: data, 3)
of_data("counted 20 times", lambda data: data, 20)
of_data("counted 1,000,000 times", lambda data: data, 1_000_000)
of_data("two classes swapped, counted 20 times", swapped, 20)
of_header("all origin fields are null", layer=None, inputs=None, weights=None, labels=None, preparation=None)
of_header("a huge image as what the model takes", inputs="float32[3,6000,6000]")
of_header("a transform that it did not apply", transform="unit")
of_header(
    "an escape in the names of classes", labels=["\x1b]0;owned\x07\x1b[2J", *(f"digit {n}" for n in range(1, 10))]
)
of_header("parts that are another's digest", parts=["0" * 64])
of_header("an escape as its producer", producer="\x1b[2J\u202e")


@attack("one example with scatter 1e9 I")
def _(scene: Scene) -> Files:
    file = told(scene.file(), one_example(scene))
    width = file.array("mean").shape[1]
    file.put("scatter", (1e9 * np.eye(width))[np.triu_indices(width)])
    return scene.sent(file)


@attack("one example at 1e6")
def _(scene: Scene) -> Files:
    return scene.sent(told(scene.file(), one_example(scene, 1e6)))


@attack("a loader that forgot / 255")
def _(scene: Scene) -> Files:
    return scene.sent(told(scene.file(), scene.data(scene.liar, pixels=1.0)))


@attack("negative definite moments under a privacy header")
def _(scene: Scene) -> Files:
    file = scene.file()
    width = file.array("mean").shape[1]
    file.put("scatter", (-1e4 * np.eye(width))[np.triu_indices(width)])
    file.set("privacy", {"unit": "example", "epsilon": 1.0, "delta": 1e-5, "mechanism": "gaussian"})
    return scene.sent(file)


@attack("held-out moments larger than the whole")
def _(scene: Scene) -> Files:
    data = scene.data(scene.liar)
    file, larger = told(scene.file(), data), told(scene.file(), scaled(data, 40))
    file.tensors |= {name: larger.tensors[name] for name in file.tensors if name.startswith("held_out.")}
    return scene.sent(file)


@attack("held-out labels swapped, the others honest")
def _(scene: Scene) -> Files:
    file, lie = told(scene.file(), scene.data(scene.liar)), told(scene.file(), swapped(scene.data(scene.liar)))
    file.tensors |= {name: lie.tensors[name] for name in file.tensors if name.startswith("held_out.")}
    return scene.sent(file)


@attack("a replay with another producer")
def _(scene: Scene) -> Files:
    file = scene.file()
    file.set("producer", "unskew 9")
    return [*scene.files, *scene.sent(file)[-1:]]


@attack("the same site in another precision")
def _(scene: Scene) -> Files:
    return [*scene.files, _again(scene, "pooled", "bfloat16")]


@attack("the same site in another form")
def _(scene: Scene) -> Files:
    return [*scene.files, _again(scene, "class", "float64")]


def _again(scene: Scene, form: str, precision: str) -> Path:
    """The liar's data, collected once more in another way."""
    return collected(scene.federation, scene.folder / "liar_again.stats", scene.liar, form, precision)


@attack("a class far away, of many examples")
def _(scene: Scene) -> Files:
    data = scene.data(scene.liar)
    z = np.repeat(data.z[data.y == 0].mean(0, keepdims=True) * 5, 300, 0)
    return scene.sent(told(scene.file(), Features(z, np.full(300, 1), np.arange(300) % 5 == 0)))


@attack("a class's mean in the place of another's, of many examples")
def _(scene: Scene) -> Files:
    data = scene.data(scene.liar)
    z = np.repeat(data.z[data.y == 0], 20, 0)
    return scene.sent(told(scene.file(), Features(z, np.full(len(z), 6), np.arange(len(z)) % 5 == 0)))


@attack("two sites collude to swap two classes")
def _(scene: Scene) -> Files:
    pair = (scene.liar, (scene.liar + 1) % SITES)
    return scene.sent(*(told(scene.file(site), swapped(scene.data(site))) for site in pair), instead=pair)


@attack("six of ten sites swap two classes")
def _(scene: Scene) -> Files:
    some = tuple(range(4, 10))
    return scene.sent(*(told(scene.file(site), swapped(scene.data(site))) for site in some), instead=some)


@attack("ten more sites of one example each, at 30 times its size")
def _(scene: Scene) -> Files:
    data = scene.data(scene.liar)
    ones = [Features(data.z[n : n + 1] * 30, data.y[n : n + 1], np.array([False])) for n in range(10)]
    return scene.sent(*(told(scene.file(), one) for one in ones), instead=())


# ---------------------------------------------------------------------------------------------- honest and odd


def _dimmed(factor: float) -> Callable[[Scene], Files]:
    return lambda scene: scene.sent(told(scene.file(), scene.data(scene.liar, pixels=factor / 255)))


def _some(choose: Callable[[Features], Features]) -> Callable[[Scene], Files]:
    return lambda scene: scene.sent(told(scene.file(), choose(scene.data(scene.liar))))


def _others(scene: Scene) -> Files:
    return [path for number, path in enumerate(scene.files) if number != scene.liar]


HONEST: dict[str, Callable[[Scene], Files]] = {
    "one example": lambda scene: scene.sent(told(scene.file(), one_example(scene))),
    "two examples of one class": _some(lambda data: Features(*(part[data.y == 2][:2] for part in data))),
    "one class alone": _some(lambda data: Features(*(part[data.y == 7] for part in data))),
    "one example of each class": _some(
        lambda data: Features(*(part[np.unique(data.y, return_index=True)[1]] for part in data))
    ),
    "images that are dimmer": _dimmed(0.8),
    "images that are brighter": _dimmed(1.2),
    "nothing held out of a small site": _some(lambda data: data._replace(held=np.zeros_like(data.held))),
    "two sites alone": lambda scene: scene.files[:2],
    "one site alone": lambda scene: [scene.files[scene.liar]],
    "files in several precisions": lambda scene: [*_others(scene), _again(scene, "pooled", "int16")],
    "a file of the class form": lambda scene: [*_others(scene), _again(scene, "class", "float64")],
}


def outcomes(scene: Scene) -> list[Outcome]:
    """Every attack, carried out."""
    return [scene.outcome(name, made(scene)) for name, made in ATTACKS.items()]


def honest(scene: Scene) -> list[Outcome]:
    """Honest sites that are odd: each must be accepted."""
    return [scene.outcome(name, made(scene)) for name, made in HONEST.items()]
