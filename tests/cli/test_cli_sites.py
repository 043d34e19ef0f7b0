"""The exchange on files, as sites and server type it."""

import json
import re
import runpy
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from helpers.commands import ENVIRONMENT, unskew
from unskew.calibration.ridge import ffc
from unskew.calibration.selection import named
from unskew.cli.shared import FORMS, PRECISIONS
from unskew.conversation.answers import read_answer
from unskew.conversation.model_file import open_model
from unskew.files.writing import save_sealed
from unskew.models.cutting import split
from unskew.statistics.collecting import collect
from unskew.statistics.header import read_header
from unskew.statistics.moments import FeatureStats

NET = """
import torch
from torch import nn

def build(classes=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, classes))

def headless():
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU())

def plain():
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4, bias=False))

def fails():
    raise RuntimeError("no such luck")
"""


def points(n, seed, classes=(0, 1, 2, 3)):
    draw = np.random.default_rng(seed)
    y = draw.choice(classes, n)
    centres = np.random.default_rng(99).normal(size=(4, 12))
    return (1.2 * centres[y] + draw.normal(size=(n, 12))).astype(np.float32), y


@pytest.fixture
def work(tmp_path, monkeypatch):
    """Three sites with different classes, a model with good features and a poor head, test data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
    save_file(net.state_dict(), tmp_path / "global.safetensors")
    for number, held in enumerate([(0, 1), (1, 2, 3), (3,)]):
        x, y = points(120, number, held)
        np.savez(tmp_path / f"site_{number}.npz", x=x, y=y)
    x, y = points(400, 7)
    np.savez(tmp_path / "test.npz", x=x, y=y)
    return tmp_path


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


MODEL = ("--model", "net.py:build", "--weights", "global.safetensors")


def collected(*options, sites=3, names="site_{}.stats"):
    files = []
    for number in range(sites):
        files.append(names.format(number))
        answer = unskew("stats", *MODEL, "--data", f"site_{number}.npz", "--out", files[-1], *options)
        assert answer.code == 0, answer.err
    return files


def accuracy(weights, *options):
    answer = unskew(
        "evaluate", "--model", "net.py:build", "--weights", weights, "--data", "test.npz", "--json", *options
    )
    assert answer.code == 0, answer.err
    return json.loads(answer.out)["model"]["accuracy"]


def test_the_gain_is_forecast_where_class_moments_tell_it(work):
    files = collected("--form", "class")
    made = ("calibrate", *MODEL, "--stats", *files, "--out", "better.safetensors", "--force", "--calibrator")
    answer = unskew(*made, "ccvr:samples=200")
    assert answer.code == 0, answer.err
    told = float(answer.out.partition("Expected, from the moments: ")[2].partition(" points of accuracy")[0])
    assert told == pytest.approx(100 * (accuracy("better.safetensors") - accuracy("global.safetensors")), abs=25)
    for other in (("ccvr:samples=200", "--prior", "uniform"), ("ffc",), ("gnb",)):
        answer = unskew(*made, *other)
        assert answer.code == 0, answer.err
        assert "Expected" not in answer.out


def test_the_exchange_from_end_to_end(work):
    files = collected()
    answer = unskew("calibrate", *MODEL, "--stats", *files, "--out", "better.safetensors")
    assert answer.code == 0, answer.err
    assert "Unverified" in answer.out
    assert "Wasserstein" not in answer.out
    assert "loads in plain torch" in answer.out
    assert accuracy("better.safetensors") > accuracy("global.safetensors") + 0.2
    net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
    net.load_state_dict(load_file("better.safetensors"))  # without Unskew
    old = load_file("global.safetensors")
    assert all(net.state_dict()[name].equal(old[name]) for name in ("0.weight", "0.bias"))
    with np.load("test.npz") as test:
        right = (net(torch.from_numpy(test["x"])).argmax(1).numpy() == test["y"]).mean()
    assert right == pytest.approx(accuracy("better.safetensors"))


def test_the_head_is_that_of_all_data_in_one_place(work):
    files = collected()
    assert unskew("calibrate", *MODEL, "--stats", *files, "--out", "b.safetensors", "--calibrator", "ffc").code == 0
    x, y = (np.concatenate([np.load(f"site_{n}.npz")[key] for n in range(3)]) for key in "xy")
    net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
    net.load_state_dict(load_file("global.safetensors"))
    model = split(net, torch.zeros(2, 12))
    stats = collect(model, [(torch.from_numpy(x), torch.from_numpy(y))], 4, "pooled")
    head = ffc()(stats, model.classifier, torch.Generator())
    assert load_file("b.safetensors")["2.weight"].numpy() == pytest.approx(head.weight.detach().numpy(), abs=1e-6)


@pytest.mark.parametrize("form", ["class", "pooled", "diagonal", "none"])
@pytest.mark.parametrize("precision", ["int16", slow("float64")])
def test_every_rung_of_the_ladder_calibrates(work, form, precision):
    files = collected("--form", form, "--precision", precision)
    answer = unskew("calibrate", *MODEL, "--stats", *files, "--out", "better.safetensors")
    assert answer.code == 0, answer.err
    assert accuracy("better.safetensors") > accuracy("global.safetensors") + 0.2


@pytest.mark.parametrize("held_out", [False, True])
def test_the_size_is_said_and_a_budget_is_kept(work, held_out):
    said = unskew("stats", *MODEL, "--data", "site_0.npz", "--out", "a.stats", "--form", "class").out
    size = (work / "a.stats").stat().st_size
    assert f"{size:,} B" in said or f"{size / 1e3:,.1f} kB" in said

    def written(*options):
        options = (*options, "--hold-out", "0.3") if held_out else options
        answer = unskew("stats", *MODEL, "--data", "site_0.npz", "--out", "b.stats", "--force", *options)
        assert answer.code == 0, answer.err
        return (work / "b.stats").stat().st_size

    rungs = [(form, precision) for form in FORMS for precision in PRECISIONS]  # the richest first
    sizes = {rung: written("--form", rung[0], "--precision", rung[1]) for rung in rungs}
    spare = 900 if held_out else 400  # that a budget may leave unused
    for budget in sorted({size + extra for size in sizes.values() for extra in (0, spare)}):
        if budget < min(sizes.values()) + spare:
            continue
        assert written("--budget", str(budget)) <= budget
        head = read_header(work / "b.stats")
        richer = rungs[: rungs.index((head.form, head.precision))]
        assert all(sizes[rung] > budget - spare for rung in richer)
    held = ("--hold-out", "0.3") if held_out else ()
    answer = unskew("stats", *MODEL, "--data", "site_0.npz", "--out", "c.stats", "--budget", "1kB", *held)
    assert answer.code == 2
    least = int(re.search(r"but ([\d,]+) B is the least that these options need", answer.err)[1].replace(",", ""))
    assert min(sizes.values()) <= least <= min(sizes.values()) + spare
    assert written("--budget", str(least)) <= least
    assert (
        "500kB or 10MB" in unskew("stats", *MODEL, "--data", "site_0.npz", "--out", "c.stats", "--budget", "much").err
    )
    assert not (work / "c.stats").exists()


def test_sites_come_and_go(work):
    files = collected()

    def head(*options):
        assert (
            unskew(
                "calibrate", *MODEL, *options, "--out", "x.safetensors", "--force", "--calibrator", "ffc:ridge=1"
            ).code
            == 0
        )
        return load_file("x.safetensors")["2.weight"].double().numpy()

    expected = head("--stats", files[0], files[2])
    assert head("--stats", *files, "--without", files[1]) == pytest.approx(expected, abs=1e-8)
    head("--stats", *files, "--sum", "total.stats")
    assert head("--sums", "total.stats", "--without", files[1]) == pytest.approx(expected, abs=1e-6)
    head("--stats", *files[:2], "--sum", "two.stats")
    everyone = head("--stats", *files)
    assert head("--sums", "two.stats", "--stats", files[2]) == pytest.approx(everyone, abs=1e-8)


def test_no_harm(work):
    files = collected("--form", "class")
    answer = unskew("calibrate", *MODEL, "--stats", *files, "--propose", "heads.safetensors")
    assert answer.code == 0, answer.err
    answers = []
    for number in range(3):
        answers.append(f"site_{number}.answer")
        answer = unskew(
            "evaluate", *MODEL, "--data", f"site_{number}.npz", "--heads", "heads.safetensors",
            "--stats", files[number], "--out", answers[-1],
        )  # fmt: skip
        assert answer.code == 0, answer.err
    validated = ("--stats", *files, "--heads", "heads.safetensors", "--validate", *answers)
    answer = unskew("calibrate", *MODEL, *validated, "--out", "better.safetensors")
    assert answer.code == 0, answer.err
    assert "is better than the old head" in answer.out
    assert "Unverified" not in answer.out
    assert accuracy("better.safetensors") > accuracy("global.safetensors")

    told = read_answer(work / answers[0])
    right = {name: told.total if name == "old" else [0] * 4 for name in told.right}
    (work / "skewed.answer").write_text(told._replace(right=right).sealed().to_bytes().decode())
    answer = unskew("calibrate", *MODEL, *validated[:-3], "skewed.answer", "--out", "same.safetensors")
    assert "The old head stays" in answer.out
    old, same = load_file("global.safetensors"), load_file("same.safetensors")
    assert all(old[name].equal(same[name]) for name in old)

    again = unskew("calibrate", *MODEL, *validated, answers[0], "--out", "z.safetensors")
    assert "site_0.answer: a second answer of site_0.stats, beside site_0.answer" in again.err
    (work / "broken.answer").write_text("{}")
    assert (
        "broken.answer" in unskew("calibrate", *MODEL, *validated[:-3], "broken.answer", "--out", "z.safetensors").err
    )
    other = unskew("calibrate", *MODEL, "--stats", *files, "--propose", "other.safetensors", "--calibrator", "ffc")
    assert other.code == 0
    wrong = unskew(
        "calibrate",
        *MODEL,
        "--stats",
        *files,
        "--heads",
        "other.safetensors",
        "--validate",
        *answers,
        "--out",
        "z.safetensors",
    )
    assert wrong.code == 1
    assert "site_0.answer" in wrong.err
    fewer = unskew("calibrate", *MODEL, "--stats", *files[1:], *validated[4:], "--out", "z.safetensors")
    assert "heads.safetensors: heads made from other statistics" in fewer.err


def test_what_is_scored_as_held_out_was_held_out(work):
    files = collected("--hold-out", "0.2")
    assert unskew("calibrate", *MODEL, "--stats", *files, "--propose", "h.safetensors").code == 0
    for share in ("0.2", "0.5"):
        answers = []
        for number in range(3):
            answers.append(f"{share}_{number}.answer")
            data = ("--data", f"site_{number}.npz", "--hold-out", share)
            out = ("--stats", files[number], "--out", answers[-1])
            answer = unskew("evaluate", *MODEL, *data, "--heads", "h.safetensors", *out)
            assert answer.code == (0 if share == "0.2" else 1), answer.err
            if share == "0.5":  # seen on the site already, and on the server too
                assert f"site_{number}.npz: these are other examples than those held out" in answer.err
                told = read_answer(work / f"0.2_{number}.answer")
                (work / answers[-1]).write_text(
                    told._replace(total=[2 * n for n in told.total]).sealed().to_bytes().decode()
                )
        validated = ("--stats", *files, "--heads", "h.safetensors", "--validate", *answers)
        answer = unskew("calibrate", *MODEL, *validated, "--out", f"{share}.safetensors")
        if share == "0.2":
            assert answer.code == 0, answer.err
        else:
            assert answer.code == 1
            assert "as held out, but the statistics of site_0.stats hold out" in answer.err
    bare = ("--stats", *collected(names="bare_{}.stats"))
    assert unskew("calibrate", *MODEL, *bare, "--propose", "b.safetensors").code == 0
    scored = ("--data", "site_0.npz", "--hold-out", "0.2", "--heads", "b.safetensors", "--stats", bare[1],
              "--out", "b.answer")  # fmt: skip
    assert "bare_0.stats hold out 0" in unskew("evaluate", *MODEL, *scored).err


@pytest.mark.parametrize("form", ["diagonal", "none"])
def test_heads_are_made_without_what_is_held_out_from_any_form(work, form):
    files = collected("--hold-out", "0.3", "--form", form)
    answer = unskew("calibrate", *MODEL, "--stats", *files, "--propose", "h.safetensors")
    assert answer.code == 0, answer.err
    assert "of the rest the form none is known" in answer.err
    total = FeatureStats.load(files[0]) + FeatureStats.load(files[1]) + FeatureStats.load(files[2])
    held = total.held_out
    rest = (total.cross - held.cross).T / (total.count - held.count)[:, None]
    assert load_file("h.safetensors")["ncm/weight"] == pytest.approx((rest - rest.mean(0)).numpy(), abs=1e-4)


NORMED = """
import torch
from torch import nn
from torch.nn.utils import parametrizations

def weight(classes=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), parametrizations.weight_norm(nn.Linear(16, classes)))

def spectral(classes=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), parametrizations.spectral_norm(nn.Linear(16, classes))).eval()

def bare():
    torch.manual_seed(0)
    return nn.Linear(12, 4)
"""


@pytest.mark.parametrize(("name", "options"), [("weight", ()), ("weight", ("--classes", "5")), ("bare", ())])
def test_layers_of_other_kinds_go_round(work, name, options):
    (work / "normed.py").write_text(NORMED)
    model = ("--model", f"normed.py:{name}", *options)
    assert unskew("stats", *model, "--data", "site_0.npz", "--out", "a.stats").code == 0
    answer = unskew("calibrate", *model, "--stats", "a.stats", "--out", "a.safetensors", "--calibrator", "ffc:ridge=1")
    assert answer.code == 0, answer.err
    read = ("--model", f"normed.py:{name}", "--weights", "a.safetensors", "--data", "site_0.npz", "--json")
    answer = unskew("evaluate", *read)
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["model"]["accuracy"] > 0.7


@pytest.mark.parametrize("change", [{"classes": 99_999}, {"classes": -1}, {"layer": "7"}])
@pytest.mark.parametrize("transform", ["identity", "unit"])
def test_a_calibrated_model_that_contradicts_itself_is_refused(work, change, transform):
    files = collected("--transform", transform)
    assert unskew("calibrate", *MODEL, "--stats", *files, "--out", "x.safetensors").code == 0
    with safe_open("x.safetensors", "pt") as file:
        about = json.loads(file.metadata()["model"])
    tree = load_file("x.safetensors")
    save_sealed(work / "forged.safetensors", tree, {"model": json.dumps(about | change)})
    read = ("--model", "net.py:build", "--data", "test.npz")
    refusal = unskew("evaluate", *read, "--weights", "forged.safetensors").err
    words = ("is not among its weights", "the limit 'classes'", "classes must be")
    assert any(some in refusal for some in words), refusal
    del tree["2.weight"]
    save_sealed(work / "short.safetensors", tree, {"model": json.dumps(about)})
    answer = unskew("evaluate", *read, "--weights", "short.safetensors")
    assert answer.code == 1
    assert "short.safetensors: its" in answer.err


def test_a_layer_that_can_not_hold_a_new_weight_is_refused_before_sites_have_worked(work):
    (work / "normed.py").write_text(NORMED)
    answer = unskew("stats", "--model", "normed.py:spectral", "--data", "site_0.npz", "--out", "a.stats")
    assert answer.code == 2
    assert "layer '2' makes its weight of other tensors, as LoRA and spectral norm do" in answer.err
    assert not (work / "a.stats").exists()


def test_a_new_head_in_one_round(work):
    """Statistics for another task: no training rounds at all, and the head is that of all data in one place."""
    for number in range(3):
        with np.load(f"site_{number}.npz") as held:
            np.savez(f"new_{number}.npz", x=held["x"], y=held["y"] % 3)
    files = []
    for number in range(3):
        files.append(f"new_{number}.stats")
        answer = unskew("stats", *MODEL, "--classes", "3", "--data", f"new_{number}.npz", "--out", files[-1])
        assert answer.code == 0, answer.err
    answer = unskew(
        "calibrate", *MODEL, "--classes", "3", "--stats", *files, "--out", "new.safetensors", "--calibrator", "lda"
    )
    assert answer.code == 0, answer.err
    assert "(3, 16)" in answer.out
    with np.load("test.npz") as test:
        np.savez("new_test.npz", x=test["x"], y=test["y"] % 3)
    answer = unskew(
        "evaluate", "--model", "net.py:build", "--weights", "new.safetensors", "--data", "new_test.npz", "--json"
    )
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["model"]["accuracy"] > 0.6


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("transform", ["unit", "unit+fourier:300:7", "relu-tukey:0.5"])
def test_a_transform_travels_with_files_weights_and_programs(work, transform):
    files = collected("--transform", transform)
    assert read_header(work / files[0]).transform.startswith(transform)
    options = ("--out", "better.safetensors", "--export", "model.pt2", "--calibrator", "ffc:choose=true")
    answer = unskew("calibrate", *MODEL, "--stats", *files, *options)
    assert answer.code == 0, answer.err
    assert "plain torch needs --export" in answer.out
    scored = accuracy("better.safetensors")
    assert scored > accuracy("global.safetensors") + 0.2
    script = (
        "import sys, numpy, torch\n"
        "sys.modules['unskew'] = None\n"
        "net = torch.export.load('model.pt2').module()\n"
        "test = numpy.load('test.npz')\n"
        "print((net(torch.from_numpy(test['x'])).argmax(1).numpy() == test['y']).mean())"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert float(done.stdout) == pytest.approx(scored, abs=0.003), done.stderr


def test_priors(work):
    files = collected("--form", "class")

    def head(*options):
        answer = unskew("calibrate", *MODEL, "--stats", *files, "--out", "x.safetensors", "--force", *options)
        assert answer.code == 0, answer.err
        return load_file("x.safetensors")

    (work / "prior.txt").write_text("0.1, 0.2\n0.3 0.4")
    for calibrator in ("lda", "ffc", "ccvr:samples=50:epochs=1"):
        own = ("--calibrator", calibrator)
        uniform, train, file = (head(*own, "--prior", prior) for prior in ("uniform", "train", "prior.txt"))
        assert not uniform["2.bias"].allclose(train["2.bias"])
        assert not uniform["2.bias"].allclose(file["2.bias"])
        if calibrator != "ccvr:samples=50:epochs=1":
            assert head(*own)["2.bias"].allclose(train["2.bias"], atol=1e-5)
    (work / "bad.txt").write_text("0.1 0.2")
    for text, message in (
        ("bad.txt", "bad.txt: it holds 2 numbers; it must hold 4"),
        ("flat", "allowed are uniform, train"),
    ):
        answer = unskew("calibrate", *MODEL, "--stats", *files, "--out", "y.safetensors", "--prior", text)
        assert message in answer.err


def test_held_out_parts_choose_the_ridge(work):
    files = collected("--hold-out", "0.25")
    assert all(20 < read_header(work / path).held_out < 40 for path in files)
    answer = unskew("calibrate", *MODEL, "--stats", *files, "--out", "x.safetensors", "--calibrator", "ffc:choose=true")
    assert answer.code == 0, answer.err
    assert re.search(
        r"note: ridge=\S+ of each feature.s own squares, by the squared error on \d+ held-out examples", answer.err
    )
    assert accuracy("x.safetensors") > accuracy("global.safetensors") + 0.2
    answer = unskew("evaluate", *MODEL, "--data", "site_0.npz", "--hold-out", "0.25", "--json")
    assert json.loads(answer.out)["model"]["examples"] == read_header(work / files[0]).held_out


def test_inspect_shows_and_warns(work):
    files = collected("--form", "class")
    answer = unskew("inspect", *files)
    assert answer.code == 0, answer.err
    assert "site_0.stats alone has class 0" in answer.out
    assert "site_1.stats alone has class 2" in answer.out
    found = json.loads(unskew("inspect", *files, "--json").out)
    assert [site["examples"] for site in found["files"]] == [120, 120, 120]
    assert [sum(row["counts"]) for row in found["table"]] == np.bincount(
        np.concatenate([np.load(f"site_{n}.npz")["y"] for n in range(3)])).tolist()  # fmt: skip
    x, y = points(900, 5)
    np.savez("site_9.npz", x=x, y=y)
    assert unskew("stats", *MODEL, "--data", "site_9.npz", "--out", "site_9.stats", "--form", "pooled").code == 0
    out = unskew("inspect", *files, "site_9.stats").out
    assert "site_9.stats dominates: 71% of all examples" in out
    assert "form pooled" in out
    save_file({name: value + 1 for name, value in load_file("global.safetensors").items()}, "later.safetensors")
    later = ("--model", "net.py:build", "--weights", "later.safetensors")
    assert unskew("stats", *later, "--data", "site_0.npz", "--out", "later.stats").code == 0
    assert "other weights behind the features" in unskew("inspect", files[0], "later.stats").out
    (work / "cut.stats").write_bytes((work / files[0]).read_bytes()[:-9])
    for others in (files, []):  # one that is damaged does not hide the others, which are looked at
        answer = unskew("inspect", *others, "cut.stats", "none.stats")
        assert answer.code == 1
        assert ("site_0.stats alone has class 0" in answer.out) == bool(others)
        assert "cut.stats: " in answer.err
        assert "none.stats: " in answer.err
    answer = unskew("inspect", "cut.stats", files[0], "--json")
    assert (answer.code, len(json.loads(answer.out)["files"])) == (1, 1)


def test_skewed_features_are_warned_of(work):
    z = torch.rand(2000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 6
    FeatureStats.of(z, torch.zeros(2000).long(), 1).save("skewed.stats")
    assume = named(lambda calibrator: calibrator.likely, "and")
    assert (
        f"features are not Gaussian, as {assume} assume (skewness, of a Gaussian 0): skewed.stats (1."
        in unskew("inspect", "skewed.stats").out
    )
    FeatureStats.of(torch.randn(2000, 3).double(), torch.zeros(2000).long(), 1, "pooled").save("straight.stats")
    assert "not Gaussian" not in unskew("inspect", "straight.stats").out


def test_bad_input_is_refused_by_name_and_nothing_is_written(work):
    files = collected()
    out = ("--out", "y.safetensors")

    def refused(message, *arguments, code=None):
        answer = unskew(*arguments)
        assert answer.code in ((1, 2) if code is None else (code,)), answer
        assert message in answer.err, answer.err
        assert "Traceback" not in answer.err
        assert not (work / "y.safetensors").exists()
        assert not (work / "y.stats").exists()

    def calibrated(message, *stats, model=MODEL, **options):
        refused(message, "calibrate", *model, "--stats", *stats, *out, **options)

    good = (work / files[0]).read_bytes()
    (work / "cut.stats").write_bytes(good[:-5])
    (work / "flipped.stats").write_bytes(good[:-9] + bytes([good[-9] ^ 4]) + good[-8:])
    (work / "empty.stats").write_bytes(b"")
    calibrated("cut.stats", files[1], "cut.stats")
    calibrated("flipped.stats", files[1], "flipped.stats")
    calibrated("empty.stats", "empty.stats")
    calibrated("missing.stats", "missing.stats")
    calibrated("the same data as", files[0], files[0])
    (work / "copy.stats").write_bytes(good)
    calibrated("copy.stats: the same data as site_0.stats", files[0], "copy.stats")
    calibrated("leaves no file", files[0], "--without", files[0])
    FeatureStats.zero(4, 16, "pooled").save("nobody.stats")
    calibrated("nobody.stats: the site has no examples", files[0], "nobody.stats")
    assert "nobody.stats holds no examples" in unskew("inspect", files[0], "nobody.stats").out
    unit = collected("--transform", "unit", sites=1, names="unit_{}.stats")
    calibrated("unit_0.stats has the transform unit, site_0.stats identity", files[0], *unit)
    save_file({name: value + 1 for name, value in load_file("global.safetensors").items()}, "later.safetensors")
    calibrated(
        "collected with other weights", *files, model=("--model", "net.py:build", "--weights", "later.safetensors")
    )
    calibrated("unknown calibrator 'fcc': did you mean 'ffc'?", *files, "--calibrator", "fcc")
    calibrated("needs statistics of form class", *files, "--calibrator", "ccvr")
    calibrated("no file 'nut.py'", *files, model=("--model", "nut.py:build"))
    calibrated("no such luck", *files, model=("--model", "net.py:fails"))
    calibrated(
        "global.sft: there is no such file", *files, model=("--model", "net.py:build", "--weights", "global.sft")
    )
    refused("--out", "calibrate", *MODEL, "--stats", *files)
    refused("belong together", "calibrate", *MODEL, "--stats", *files, *out, "--heads", "h")
    refused("stats", "calibrate", *MODEL, *out)

    def gathered(message, *options, model=MODEL, data="site_0.npz", **code):
        refused(message, "stats", *model, "--data", data, "--out", "y.stats", *options, **code)

    gathered("missing.npz", data="missing.npz")
    gathered("can't cut Sequential", model=("--model", "net.py:headless"))
    gathered("don't fit the model", model=("--model", "net.py:headless", "--weights", "global.safetensors"))
    gathered("'9'", "--layer", "9")
    np.savez("labels.npz", x=np.zeros((3, 12), np.float32), y=np.array([0, 4, 1]))
    gathered("labels.npz", data="labels.npz")
    np.savez("none.npz", x=np.zeros((0, 12), np.float32), y=np.zeros(0, np.int64))
    gathered("none.npz", data="none.npz")
    np.savez("nan.npz", x=np.full((3, 12), np.nan, np.float32), y=np.array([0, 1, 1]))
    gathered("nan", data="nan.npz")
    gathered("'--hold-out': 1.5 is not in the range", "--hold-out", "1.5")
    gathered("unknown transform 'log'", "--transform", "log")
    (work / "pickle.pt").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    gathered("pickle.pt", model=("--model", "net.py:build", "--weights", "pickle.pt"))
    assert not (work / "ran").exists()
    (work / "there.stats").write_text("precious")
    answer = unskew("stats", *MODEL, "--data", "site_0.npz", "--out", "there.stats")
    assert answer.code == 2
    assert "there.stats is there already" in answer.err
    assert (work / "there.stats").read_text() == "precious"


def test_a_classifier_without_a_bias_stays_without(work):
    net = {name: value for name, value in load_file("global.safetensors").items() if name != "2.bias"}
    save_file(net, "plain.safetensors")
    model = ("--model", "net.py:plain", "--weights", "plain.safetensors")
    for form in ("pooled", "none"):
        assert unskew("stats", *model, "--data", "site_0.npz", "--out", f"{form}.stats", "--form", form).code == 0
    assert unskew("calibrate", *model, "--stats", "pooled.stats", "--out", "b.safetensors").code == 0
    assert set(load_file("b.safetensors")) == set(net)
    answer = unskew("calibrate", *model, "--stats", "none.stats", "--out", "c.safetensors")
    assert answer.code == 2
    assert "without a bias" in answer.err


def test_fedcof_takes_the_files_apart(work):
    for number in range(12):
        x, y = points(40, number)
        np.savez(f"site_{number}.npz", x=x, y=y)
    files = collected("--form", "none", sites=12)
    answer = unskew(
        "calibrate", *MODEL, "--stats", *files, "--out", "b.safetensors", "--calibrator", "fedcof:gamma=0.1"
    )
    assert answer.code == 0, answer.err
    assert accuracy("b.safetensors") > accuracy("global.safetensors") + 0.2


def test_text_by_a_loader_of_ones_own(work):
    """Inputs of several parts: the server has no example to cut the model with, and takes the layer of the files."""
    (work / "text.py").write_text(
        """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.words, self.score = nn.Embedding(40, 24), nn.Linear(24, 3)

    def forward(self, ids, mask):
        mask = mask[..., None].float()
        return {"logits": self.score((self.words(ids) * mask).sum(1) / mask.sum(1))}

def build():
    return Net()

def batches(part="train", batch=32):
    draw = torch.Generator().manual_seed(len(part))
    for _ in range(6):
        y = torch.randint(3, (batch,), generator=draw)
        ids = 10 * y[:, None] + torch.randint(14, (batch, 8), generator=draw)
        yield {"ids": ids, "mask": torch.ones(batch, 8)}, y
"""
    )
    model = ("--model", "text.py:build")
    torch.save(runpy.run_path("text.py")["build"]().state_dict(), "text.pt")
    model = (*model, "--weights", "text.pt")
    assert unskew("stats", *model, "--data", "text.py:batches", "--out", "t.stats").code == 0
    answer = unskew("calibrate", *model, "--stats", "t.stats", "--out", "t.safetensors")
    assert answer.code == 0, answer.err

    def scored(weights):
        found = unskew(
            "evaluate", "--model", "text.py:build", "--weights", weights, "--data", "text.py:batches", "--json"
        )
        return json.loads(found.out)["model"]["accuracy"]

    assert scored("t.safetensors") > max(0.8, scored("text.pt") + 0.2)
    answer = unskew("calibrate", *model, "--stats", "t.stats", "--out", "u.safetensors", "--export", "t.pt2")
    assert answer.code == 0, answer.err
    program = torch.export.load("t.pt2").module()
    net = runpy.run_path("text.py")["build"]()
    net.load_state_dict(load_file("u.safetensors"))
    ids, mask = torch.randint(40, (5, 13)), torch.ones(5, 13)  # longer texts than any site had
    torch.testing.assert_close(program(ids=ids, mask=mask), net(ids, mask)["logits"])


def test_only_what_is_in_a_sum_can_be_taken_out(work):
    files = collected()
    answer = unskew("calibrate", *MODEL, "--stats", files[0], files[2], "--without", files[1], "--out", "y.safetensors")
    assert "site_1.stats: no part of the sum" in answer.err
    assert unskew("calibrate", *MODEL, "--stats", *files[:2], "--sum", "two.stats", "--out", "x.safetensors").code == 0
    answer = unskew("calibrate", *MODEL, "--stats", files[1], "--sums", "two.stats", "--out", "y.safetensors")
    assert "site_1.stats: the same data as two.stats" in answer.err
    for stats in (["--sums", "two.stats"], ["--sums", "two.stats", "--without", files[0]], []):
        answer = unskew(
            "calibrate", *MODEL, "--stats", files[2], *stats, "--out", "y.safetensors", "--calibrator", "fedcof"
        )
        assert answer.code == 2
        assert "fedcof needs each" in answer.err


def test_heads_are_scored_on_what_they_have_not_seen(work):
    """Labels that mean nothing: a head that fits them by heart must not win on what was held out."""
    draw = np.random.default_rng(0)
    (work / "wide.py").write_text(
        "import torch\ndef build():\n    torch.manual_seed(0)\n"
        "    return torch.nn.Sequential(torch.nn.Linear(12, 400), torch.nn.ReLU(), torch.nn.Linear(400, 2))\n"
    )
    np.savez("noise.npz", x=draw.normal(size=(300, 12)).astype(np.float32), y=draw.integers(0, 2, 300))
    model = ("--model", "wide.py:build")
    assert unskew("stats", *model, "--data", "noise.npz", "--hold-out", "0.4", "--out", "n.stats").code == 0
    options = ("--propose", "h.safetensors", "--calibrator", "ffc")
    assert unskew("calibrate", *model, "--stats", "n.stats", *options).code == 0
    held = ("--data", "noise.npz", "--hold-out", "0.4", "--heads", "h.safetensors", "--json")
    found = json.loads(unskew("evaluate", *model, *held).out)
    assert found["ffc"]["accuracy"] < 0.65
    assert found["ffc"]["examples"] == read_header(work / "n.stats").held_out


def test_tables_with_columns_in_another_order_are_refused(work):
    draw = np.random.default_rng(0)
    names = [f"f{number}" for number in range(12)]
    for name, order in (("a", names), ("b", names[::-1])):
        rows = [",".join([*(f"{v:.3f}" for v in draw.normal(size=12)), str(k % 4)]) for k in range(40)]
        (work / f"{name}.csv").write_text("\n".join([",".join([*order, "label"]), *rows]))
        assert unskew("stats", *MODEL, "--data", f"{name}.csv", "--out", f"{name}.stats").code == 0
    answer = unskew("calibrate", *MODEL, "--stats", "a.stats", "b.stats", "--out", "y.safetensors")
    assert "different preparation" in answer.err
    assert "preparation" in unskew("inspect", "a.stats", "b.stats").out


def test_a_calibrated_model_can_be_calibrated_again_whatever_stands_before_its_head(work):
    diagonal = collected("--form", "diagonal", names="d_{}.stats")
    assert unskew("calibrate", *MODEL, "--stats", *diagonal, "--out", "g.safetensors", "--calibrator", "gnb").code == 0
    again = ("--model", "net.py:build", "--weights", "g.safetensors")
    for number in range(3):
        answer = unskew(
            "stats", *again, "--data", f"site_{number}.npz", "--out", f"again_{number}.stats", "--form", "class"
        )
        assert answer.code == 0, answer.err
    files = [f"again_{number}.stats" for number in range(3)]
    assert unskew("calibrate", *again, "--stats", *files, "--propose", "h.safetensors").code == 0
    answer = unskew("evaluate", *again, "--data", "site_0.npz", "--heads", "h.safetensors", "--json")
    assert answer.code == 0, answer.err
    plain = json.loads(unskew("evaluate", *again, "--data", "site_0.npz", "--json").out)["model"]
    assert json.loads(answer.out)["old"] == plain
    assert unskew("calibrate", *again, "--stats", *files, "--out", "f.safetensors", "--calibrator", "ffc").code == 0
    assert accuracy("f.safetensors") > 0.7


def test_a_calibrated_model_knows_the_names_of_its_classes(work):
    (work / "names.txt").write_text("ant\nbee\ncat\ndog\n")
    assert unskew("stats", *MODEL, "--data", "site_1.npz", "--labels", "names.txt", "--out", "n.stats").code == 0
    assert unskew("calibrate", *MODEL, "--stats", "n.stats", "--out", "n.safetensors").code == 0
    with np.load("test.npz") as test:  # the same classes, numbered in another order
        order = np.array([3, 2, 1, 0])
        np.savez("named.npz", x=test["x"], y=order[test["y"]], labels=np.array(["dog", "cat", "bee", "ant"]))
    model = ("--model", "net.py:build", "--weights", "n.safetensors")
    plain = json.loads(unskew("evaluate", *model, "--data", "test.npz", "--json").out)
    named = json.loads(unskew("evaluate", *model, "--data", "named.npz", "--json").out)
    assert named == plain


def test_a_factory_with_files_beside_it_and_classes_to_be_given(work):
    (work / "models").mkdir()
    (work / "models" / "layers.py").write_text(
        "from torch import nn\nbody = lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU())\n"
    )
    (work / "models" / "mine.py").write_text(
        "from layers import body\nfrom torch import nn\n"
        "def build(classes):\n    return nn.Sequential(*body(), nn.Linear(16, classes))\n"
    )
    model = ("--model", "models/mine.py:build", "--weights", "global.safetensors", "--classes", "4")
    assert unskew("stats", *model, "--data", "site_0.npz", "--out", "s.stats").code == 0
    answer = unskew("calibrate", *model, "--stats", "s.stats", "--out", "s.safetensors")
    assert answer.code == 0, answer.err


MPS = torch.backends.mps.is_available()


def test_odd_requests_get_a_message(work):
    files = collected()

    def told(*options):
        answer = unskew("calibrate", *MODEL, "--stats", *files[:1], "--out", "y.safetensors", *options)
        assert answer.code in (1, 2), answer
        assert not (work / "y.safetensors").exists()
        return answer.err

    assert "device is 'gpu': allowed are cpu, cuda, mps" in told("--device", "gpu")
    assert "device is 'mps', which can't be used here (there is none): try cpu" in told("--device", "mps") or MPS
    assert "device is 'cuda'" in told("--device", "cuda") or torch.cuda.is_available()
    (work / "absent.txt").write_text("0 0 1 1")
    for calibrator in ("ffc", "lda"):
        assert "prior gives nothing to the classes that have examples" in told(
            "--prior", "absent.txt", "--calibrator", calibrator
        )
    assert "is to be read and to be written" in told("--sum", files[0], "--force")
    for transform in ("fourier:nan:7", "fourier:inf:7", "fourier:10:-1"):
        answer = unskew("stats", *MODEL, "--data", "site_0.npz", "--out", "y.stats", "--transform", transform)
        assert "transform" in answer.err
        assert "Traceback" not in answer.err
    assert unskew("stats", *MODEL, "--classes", "3", "--data", "site_0.npz", "--out", "three.stats").code == 0
    answer = unskew("calibrate", *MODEL, "--stats", "three.stats", "--out", "y.safetensors")
    assert "give --classes 3 for a new head" in answer.err
    tree = load_file("global.safetensors")
    odd = {"model": '{"layer": "nine", "transform": "identity", "labels": null}'}
    save_sealed(work / "odd.safetensors", tree, odd)
    answer = unskew("evaluate", "--model", "net.py:build", "--weights", "odd.safetensors", "--data", "test.npz")
    assert "odd.safetensors" in answer.err
    assert (
        "without --weights"
        in unskew("stats", "--model", "net.py:build", "--data", "site_0.npz", "--out", "z.stats").err
    )


def test_ctrl_c_leaves_nothing_behind(work):
    (work / "loader.py").write_text(
        "import pathlib, time, torch\ndef batches():\n    for number in range(1000):\n        time.sleep(0.05)\n"
        "        pathlib.Path(f'walk-{number}').touch()\n"
        "        yield torch.zeros(2, 12), torch.zeros(2).long()\n"
    )
    import signal
    import time

    from helpers.commands import subprocess_of

    process = subprocess_of("stats", *MODEL, "--data", "loader.py:batches", "--out", "y.stats")
    until = time.monotonic() + 60
    while not (work / "walk-3").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped" in err
    assert not list(work.glob("*.stats*"))
    assert not list(work.glob(".*tmp"))


def test_a_new_head_has_no_old_one_to_be_validated_against(work):
    new = (*MODEL, "--classes", "3")
    for number in range(2):
        x, y = points(120, number, (0, 1, 2))
        np.savez(f"new_{number}.npz", x=x, y=y)
        answer = unskew("stats", *new, "--data", f"new_{number}.npz", "--out", f"new_{number}.stats")
        assert answer.code == 0, answer.err
    files = ("--stats", "new_0.stats", "new_1.stats")
    said = unskew("calibrate", *new, *files, "--calibrator", "ncm", "--propose", "heads").out
    assert "heads: ncm." in said
    x, y = points(30, 5, (0,))  # where a head of zeros, which says class 0, would be best
    np.savez("leaning.npz", x=x, y=y)
    scored = unskew("evaluate", *new, "--data", "leaning.npz", "--heads", "heads", "--stats", "new_0.stats",
                    "--out", "a.answer")  # fmt: skip
    assert scored.code == 0, scored.err
    assert "old" not in scored.out
    answer = unskew("calibrate", *new, *files, "--heads", "heads", "--validate", "a.answer", "--out", "n.safetensors")
    assert answer.code == 0, answer.err
    assert "head of ncm, from heads" in answer.out
    assert "old head" not in answer.out
    assert load_file("n.safetensors")["2.weight"].any()
    assert "knows nothing yet" in unskew("evaluate", *new, "--data", "new_0.npz").err
    last = unskew("calibrate", *new, *files, "--out", "u.safetensors")
    assert "no site has checked this head;" in last.out


@pytest.mark.parametrize(
    ("spec", "weights", "classes", "fresh"),
    [
        ("net.py:build", "global.safetensors", 4, False), ("net.py:build", "global.safetensors", 3, True),
        ("net.py:build", None, None, False), ("net.py:build", None, 4, False),  # it may load weights of its own
        ("cnn:channels=1:size=16", None, 5, True),
    ],
)  # fmt: skip
def test_a_head_is_new_where_nothing_can_have_trained_it(work, spec, weights, classes, fresh):
    example = torch.zeros(2, 12) if "net" in spec else torch.zeros(2, 1, 16, 16)
    path = None if weights is None else work / weights
    assert open_model(spec, path, classes=classes, example=example).fresh == fresh


def test_a_sum_keeps_all_that_the_files_have(work):
    files = collected("--form", "class")
    for calibrator in ("auto", "ncm", "ccvr:samples=10"):
        options = ("--calibrator", calibrator, "--out", "x.safetensors", "--force")
        alone = unskew("calibrate", *MODEL, "--stats", *files, *options)
        without = load_file("x.safetensors")["2.weight"]
        both = unskew("calibrate", *MODEL, "--stats", *files, *options, "--sum", "sum.stats")
        assert alone.code == both.code == 0, both.err
        assert read_header(work / "sum.stats").form == "class"
        assert torch.equal(load_file("x.safetensors")["2.weight"], without)


def test_what_is_read_or_written_otherwise_is_not_written_over(work):
    files = collected()
    (work / "names.txt").write_text("a\nb\nc\nd\n")
    (work / "folder").mkdir()
    before = {path.name: path.read_bytes() for path in work.iterdir() if path.is_file()}
    site = ("stats", *MODEL, "--data", "site_0.npz", "--force")
    server = ("calibrate", *MODEL, "--stats", *files, "--force")
    for message, *command in (
        ("to be read and to be written", *site, "--labels", "names.txt", "--out", "names.txt"),
        ("to be read and to be written", *site, "--out", "site_0.npz"),
        ("to be read and to be written", *site[:-1], "--out", "site_0.npz"),
        ("to be read and to be written", *site, "--out", "net.py"),
        ("to be read and to be written", *server, "--out", "global.safetensors"),
        ("to be written twice", *server, "--out", "x", "--export", "./x"),
        ("to be written twice", *server, "--out", "x", "--sum", "x"),
        ("is a folder", *server, "--out", "folder"),
        ("is a device", *server, "--out", "/dev/null"),
    ):
        answer = unskew(*command)
        assert (answer.code, message in answer.err) == (2, True), answer
    assert before == {path.name: path.read_bytes() for path in work.iterdir() if path.is_file()}


def test_a_prior_is_met_exactly_where_the_files_have_each_class(work):
    """Not by the pooled part alone, which would take all classes to have one covariance."""
    files = collected("--form", "class")
    (work / "mix.txt").write_text("1 2 3 4")
    options = ("--stats", *files, "--calibrator", "ffc:ridge=1", "--prior", "mix.txt", "--out", "x.safetensors")
    assert unskew("calibrate", *MODEL, *options).code == 0
    net = runpy.run_path("net.py")["build"]()
    net.load_state_dict(load_file("global.safetensors"))
    total = sum(FeatureStats.load(work / file) for file in files)
    exact = ffc(ridge=1)(total, net[2], torch.Generator(), torch.tensor([1.0, 2, 3, 4]))
    assert load_file("x.safetensors")["2.weight"].numpy() == pytest.approx(exact.weight.detach().numpy(), abs=1e-6)
    near = ffc(ridge=1)(total.reduced("pooled"), net[2], torch.Generator(), torch.tensor([1.0, 2, 3, 4]))
    assert (near.weight - exact.weight).abs().max() > 1e-4


def test_files_of_different_forms_are_told_of(work):
    collected("--form", "class", sites=1)
    unskew("stats", *MODEL, "--data", "site_1.npz", "--out", "site_1.stats", "--form", "diagonal")
    answer = unskew("calibrate", *MODEL, "--stats", "site_0.stats", "site_1.stats", "--out", "x.safetensors")
    assert answer.code == 0
    assert "different forms: only what all have is used, form diagonal" in answer.err
    options = (
        "--calibrator",
        "ffc",
        "--out",
        "y.safetensors",
        "--without",
        "site_1.stats",
    )  # which is left out at once
    assert unskew("calibrate", *MODEL, "--stats", "site_0.stats", "site_1.stats", *options).code == 0


def test_a_part_beside_its_sum_is_warned_of(work):
    files = collected()
    unskew("calibrate", *MODEL, "--stats", *files, "--out", "x.safetensors", "--sum", "sum.stats")
    assert (
        "site_1.stats has the same data as sum.stats, or a part of them"
        in unskew("inspect", "sum.stats", "site_1.stats").out
    )


def test_candidates_know_nothing_of_a_site_that_was_taken_out_of_a_sum(work):
    """FedCOF needs sites apart, which a sum does not give: with it the site that left would have stayed in its head."""
    files = collected()
    apart = ("--stats", *files, "--propose", "apart.safetensors")
    assert unskew("calibrate", *MODEL, *apart).code == 0
    assert "fedcof/weight" in load_file("apart.safetensors")
    summed = ("--stats", *files[:2], "--sum", "two.stats", "--out", "two.safetensors")
    assert unskew("calibrate", *MODEL, *summed).code == 0
    left = ("--sums", "two.stats", "--stats", files[2], "--without", files[0], "--propose", "left.safetensors")
    answer = unskew("calibrate", *MODEL, *left)
    assert answer.code == 0, answer.err
    assert "ffc:choose=true/weight" in load_file("left.safetensors")
    assert "fedcof/weight" not in load_file("left.safetensors")


def test_a_program_with_the_preparation_ends_as_the_model_does(work):
    (work / "net.py").write_text(NET.replace("nn.Linear(16, classes))", "nn.Linear(16, classes), nn.LogSoftmax(1))"))
    files = collected()
    answer = unskew("calibrate", *MODEL, "--stats", *files, "--export", "whole.pt2", "--export-preparation")
    assert answer.code == 0, answer.err
    assert "gives log_softmax of 4 classes, one tensor" in answer.out.replace("\n", " ")
    assert "are no log-probabilities" in answer.err
    x = torch.from_numpy(np.load("test.npz")["x"])
    assert torch.export.load("whole.pt2").module()(x).exp().sum(1).tolist() == pytest.approx([1.0] * 400, abs=1e-5)


def test_a_broken_checkpoint_is_named(work):
    torch.save({"2.weight": torch.zeros(4, 16)}, "broken.pt")
    content = bytearray((work / "broken.pt").read_bytes())
    place = content.rindex(b"PK\x01\x02")
    content[place : place + 4] = b"PK\x09\x09"
    (work / "broken.pt").write_bytes(content)
    answer = unskew("stats", *MODEL[:2], "--weights", "broken.pt", "--data", "site_0.npz", "--out", "x.stats")
    assert answer.code == 1
    assert "broken.pt: not a readable file of weights, or cut short" in answer.err


def test_a_trial_refuses_labels_that_the_model_does_not_have(work):
    held = dict(np.load("test.npz"))
    np.savez("odd.npz", x=held["x"], y=held["y"] + 5)
    answer = unskew("try", *MODEL, "--sites", "site_0.npz", "site_1.npz", "--test", "odd.npz")
    assert answer.code == 1
    assert "odd.npz: labels lie in 5..8, but the model has 4 classes" in answer.err
