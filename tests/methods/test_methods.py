"""Methods by their names: what a name means, and which names are refused."""

import functools
import importlib.util
import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from helpers.rounds import gap
from helpers.toys import toy_data, toy_model
from unskew.data.partition import Federation
from unskew.errors import UsageError
from unskew.methods.algorithm import Population
from unskew.methods.bases import fedavg, feddyn, fednova, moon, scaffold
from unskew.methods.modifications import frozen_head, on_sphere, proximal, server
from unskew.methods.names import Method, method, pieces, skeleton
from unskew.methods.optim import momentum
from unskew.methods.presets import fedprox
from unskew.models.networks import Split, build, in_classifier
from unskew.models.variants import clsnorm, projection, spherical
from unskew.specs import pieces_of
from unskew.training.engines.batched import batched
from unskew.training.engines.sequential import sequential
from unskew.training.simulate import train

EXAMPLE = Path(__file__).parents[2] / "examples" / "your_own_algorithm.py"


def last(algorithm, model, federation, **options):
    settings = {"rounds": 3, "epochs": 2, "batch": 8, "lr": 0.05, "seed": 1, **options}
    *_, made = train(model, federation, algorithm, **settings)
    return made._replace(params=algorithm.final(made.params, made.state))


def trained(spec, federation, norm="batch", **options):
    found = method(spec)
    return last(
        found.algorithm, found.variant(toy_model(norm), torch.Generator().manual_seed(0)), federation, **options
    )


SAME = {
    "fedavg": (fedavg(), toy_model),
    "fedavg:weight=equal": (fedavg("equal"), toy_model),
    "fedprox:mu=0.3": (proximal(fedavg(), 0.3), toy_model),
    "scaffold+fedprox:mu=0.3+fedavgm:beta=0.5": (
        server(proximal(scaffold(), 0.3), momentum(0.5)), toy_model
    ),
    "fednova+on_sphere": (on_sphere(fednova()), lambda norm: spherical(toy_model(norm))),
    "moon:mu=2:tau=0.1+frozen_head": (frozen_head(moon(2.0, 0.1)), toy_model),
    "fedavg+clsnorm+clsprox:mu=0.4": (
        proximal(fedavg(), 0.4, only=in_classifier), lambda norm: clsnorm(toy_model(norm))
    ),
    "feddyn:alpha=0.2": (feddyn(0.2), toy_model),
    "clsprox": (proximal(fedavg(), 0.01, only=in_classifier), toy_model),
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("spec", SAME)
def test_a_name_means_what_its_pieces_mean(spec, ragged):
    algorithm, model = SAME[spec]
    assert gap(trained(spec, ragged), last(algorithm, model("batch"), ragged)) == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "spec", ["scaffold+fedprox:mu=0.3+fedopt", "moon+on_sphere+fedadam", "clsnorm+clsprox+fednova"]
)
def test_the_order_of_the_pieces_does_not_matter(spec, ragged):
    results = [trained("+".join(order), ragged) for order in itertools.permutations(spec.split("+"))]
    assert all(gap(results[0], other) < 1e-12 for other in results[1:])


def combines(names):
    try:
        method("+".join(names))
    except UsageError as error:
        assert "do not combine" in str(error)
        return False
    return True


PAIRS = [pair for pair in itertools.combinations(pieces, 2) if combines(pair)]


def test_many_pairs_combine_and_many_do_not():
    everything = len(list(itertools.combinations(pieces, 2)))
    assert 0.5 * everything < len(PAIRS) < 0.9 * everything


@pytest.mark.sampled(8, 32)
@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_a_pair_that_combines_trains_the_same_in_both_engines_and_differs_from_each_alone(names, ragged):
    if "ce" in names:  # of temperature 1 it is what there is already
        names = tuple("ce:temperature=5" if name == "ce" else name for name in names)
    spec = "+".join(names)
    one, other = (trained(spec, ragged, engine=engine, rounds=2) for engine in (sequential, batched))
    assert gap(one, other) < 1e-9
    for name in names:
        if "projection" not in names and name != "fedavg":
            mine, theirs = everything(one), alone("+".join(n for n in names if n != name) or "fedavg")
            assert mine.keys() != theirs.keys() or max((mine[k] - v).abs().max() for k, v in theirs.items()) > 1e-9


@functools.cache
def alone(spec):
    """What a piece by itself gives, which many pairs are compared with."""
    parts = (torch.arange(0, 20), torch.arange(20, 25), torch.arange(25, 60))
    return everything(trained(spec, Federation(toy_data(), parts), rounds=2))


def everything(result):
    own = {f"{id}/{name}": value for id, client in result.clients.items() for name, value in client.own.items()}
    return {**result.params, **own}


REFUSED = {
    "frozen_head+on_sphere": "both settle the classifier's rows",
    "fedrep+on_sphere": r"\(learning, fixed\); try fedrep or on_sphere, or take .*: fedrep\+unit_features\+mse$",
    "fednova+lg_fedavg+fedbabu": "try fednova\\+lg_fedavg or fednova\\+fedbabu",
    "lg_fedavg+fedrep": "both settle what stays at home",
    "fednova+scaffold": r"both settle the base method \(fednova, scaffold\); try fednova or scaffold$",
    "fedavgm+fedopt": "both settle the server's step",
    "on_sphere+ce:temperature=8": r"apart: ce:temperature=8\+unit_features\+frozen_head:rows=qr$",
    "mse+ce": "both settle the loss",
    "clsprox+frozen_head": "both settle the classifier",
    "clsnorm+on_sphere": "both settle the classifier",
    "fedprox:mu=1+fedprox:mu=2": "names fedprox twice: try fedprox:mu=1 or fedprox:mu=2",
    "fedavg+": "empty piece",
    "fedavg+fedporx": "unknown method 'fedporx': did you mean 'fedprox'",
    "fedavg+on_sphere:rows=cube": "unknown placement of rows 'cube'",
    "frozen_head:rows=cube": "unknown placement of rows 'cube'.*own, qr",
    "ce:temperature=0": "temperature is 0.0: it must be above 0",
    "projection:width=0": "width is 0: it must be at least 1",
}  # fmt: skip


@pytest.mark.parametrize("spec", REFUSED)
def test_pieces_that_do_not_combine_are_refused_with_what_does(spec):
    with pytest.raises(UsageError, match=REFUSED[spec]):
        method(spec).variant(toy_model(), torch.Generator())
    try:
        method(spec)
    except UsageError as error:
        for working in re.findall(r"(?:try|apart:) ([^,]+?)(?:,|$)", str(error)):
            for part in working.split(" or "):
                method(part)


def test_sphere_refuses_a_head_with_a_bias_and_features_of_other_norms(ragged):
    with pytest.raises(UsageError, match=r"classifier has no bias, but this model's has one: train spherical\(model\)"):
        last(on_sphere(fedavg()), toy_model(), ragged)
    with pytest.raises(
        UsageError, match=r"features have unit norm, but this model's have not: train spherical\(model\)"
    ):
        last(on_sphere(fedavg()), toy_model(bias=False), ragged)
    last(on_sphere(fedavg()), spherical(toy_model()), ragged, rounds=1)


def test_moon_asks_for_a_projection_head(ragged):
    bare = Split(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()), nn.Linear(4, 5))
    bare = bare.double()
    for algorithm in (moon(), on_sphere(moon()), frozen_head(moon())):
        model = spherical(bare) if algorithm.criterion is not moon().criterion else bare
        with pytest.raises(UsageError, match=r"projection head.*moon\+projection.*moon:projection=false"):
            last(algorithm, model, ragged)
    last(moon(), projection(bare, 6), ragged, rounds=1)
    last(moon(projection=False), bare, ragged, rounds=1)
    for name, network in (("cnn", True), ("small-cnn", True), ("resnet18", False), ("mobilenetv2", False)):
        model = build(name, 10, 3, 32)
        x = torch.zeros(2, 3, 32, 32)
        from unskew.methods.algorithm import Output

        output = Output(model.features(x), model(x))
        if network:
            moon().fits(model, output)
        else:
            with pytest.raises(UsageError, match="projection head"):
                moon().fits(model, output)


def test_a_method_that_shares_nothing_is_refused(ragged):
    from unskew.methods.modifications import keep_local
    from unskew.models.networks import in_features

    with pytest.raises(UsageError, match="shares no tensor that learns"):
        last(frozen_head(keep_local(fedavg(), in_features)), toy_model("none"), ragged)


# SphereFed's Table 3, each cell by its name.
TABLE_3 = {
    (loss, fixed, norm): "+".join(
        ["fedavg", *([fixed] if fixed else []), *(["unit_features"] if norm else []), loss]
    )
    for loss in ("ce:temperature=10", "mse")
    for fixed in ("", "frozen_head:rows=he", "frozen_head:rows=gram-schmidt")
    for norm in (False, True)
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("cell", TABLE_3)
def test_the_ablation_of_table_3_is_expressible(cell, ragged):
    loss, fixed, norm = cell
    found = method(TABLE_3[cell])
    model = found.variant(toy_model("batch"), torch.Generator().manual_seed(0))
    x = torch.randn(4, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    norms = model.eval().features(x).detach().norm(dim=1)
    assert (norms == pytest.approx(np.ones(4))) == norm
    weight = model.classifier.weight.detach()
    orthonormal = (weight @ weight.T - torch.eye(5)).abs().max().item() < 1e-6
    assert orthonormal == fixed.endswith("schmidt")
    results = [last(found.algorithm, model, ragged, engine=engine) for engine in (sequential, batched)]
    assert gap(*results) < 1e-9
    assert torch.equal(results[0].params["classifier.weight"], weight) == bool(fixed)
    logits, labels = torch.randn(6, 5), torch.arange(6) % 5
    expected = nn.functional.cross_entropy(10 * logits, labels) if loss.startswith("ce") else (
        ((logits - nn.functional.one_hot(labels, 5)) ** 2).mean()
    )  # fmt: skip
    assert found.algorithm.criterion(logits, labels).item() == pytest.approx(expected.item())


def test_on_sphere_is_its_parts(ragged):
    together, apart = (trained(spec, ragged) for spec in ("on_sphere", "unit_features+frozen_head:rows=qr+mse"))
    assert gap(together, apart) == 0


@pytest.mark.parametrize("spec", ["fedavg", "fednova+on_sphere:rows=tammes", "clsnorm", "moon+projection:width=7",
                                  "frozen_head", "frozen_head:rows=simplex+projection+unit_features"])  # fmt: skip
def test_a_skeleton_takes_the_weights_of_its_variant(spec):
    made = method(spec).variant(toy_model(), torch.Generator().manual_seed(3))
    empty = skeleton(spec, toy_model(seed=5))
    empty.load_state_dict(made.state_dict())
    x = torch.randn(4, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(empty.eval()(x), made.eval()(x))
    assert type(empty.classifier) is type(made.classifier)


def test_a_variant_is_drawn_from_its_generator_alone():
    state = torch.random.get_rng_state()
    for spec in ("moon+projection", "on_sphere", "frozen_head:rows=he"):
        first, second, other = (
            method(spec).variant(toy_model(), torch.Generator().manual_seed(seed)).classifier.weight
            for seed in (1, 1, 2)
        )
        assert torch.equal(first, second)
        assert not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), state)


# ---------------------------------------------------------------------------------------------- methods of one's own


def example():
    spec = importlib.util.spec_from_file_location("your_own_algorithm", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.sampled(4)
@pytest.mark.parametrize("norm", ["group", "batch", "none"])
@pytest.mark.parametrize("spec", [f"{EXAMPLE}:fedexp", f"{EXAMPLE}:fedexp:eps=0.1+on_sphere",
                                  f"fednova+{EXAMPLE}:clipped:norm=0.5+on_sphere",
                                  f"{EXAMPLE}:clipped+{EXAMPLE}:fedexp"])  # fmt: skip
def test_the_example_trains_in_both_engines(spec, norm, ragged):
    results = [trained(spec, ragged, norm, engine=engine) for engine in (sequential, batched)]
    assert gap(*results) < 1e-9


def test_the_example_does_what_its_paper_says():
    """Two clients with opposite and with equal deltas: the more they disagree, the longer the step."""
    fedexp = example().fedexp(eps=0.0)
    start = {"w": torch.zeros(2)}
    for deltas, step in (([[2.0, 0.0], [0.0, 2.0]], 1.0), ([[3.0, 1.0], [-1.0, 1.0]], 1.5), ([[1.0, 1.0]] * 2, 1.0)):
        total = {"delta/w": torch.tensor(deltas).sum(0), "squares": torch.tensor(deltas).square().sum(),
                 "clients": torch.tensor(2.0)}  # fmt: skip
        new, _ = fedexp.update(start, {}, total)
        assert new["w"].tolist() == pytest.approx((step * torch.tensor(deltas).mean(0)).tolist())


def test_the_example_clips(ragged):
    clipped = example().clipped(fedavg(), norm=0.5)
    short, long = ({"w": torch.full((4,), value)} for value in (0.1, 7.0))
    assert torch.equal(clipped.correct(short, {}, None)["w"], short["w"])
    assert clipped.correct(long, {}, None)["w"].norm().item() == pytest.approx(0.5)


def test_the_example_is_short():
    lines = EXAMPLE.read_text().split('"""', 2)[2].strip().splitlines()
    assert len([line for line in lines if line.strip()]) <= 32


def test_files_that_hold_no_method_are_refused(tmp_path):
    path = tmp_path / "mine.py"
    text = (
        "def nothing():\n    return 3\n\ndef broken(mu=0.1):\n    return mu / 0\n\ndef needy(strength):\n    return 0\n"
    )
    path.write_text(text)
    for spec, message in {
        f"{path}:nothing": "returned int, not an Algorithm",
        f"{path}:broken:mu=2": "ZeroDivisionError",
        f"{path}:broken:nu=2": "unknown option",
        f"{path}:absent": "has no function 'absent'",
        f"{path}:needy": "give its strength defaults, so that they are options",
        f"{tmp_path}/no.py:factory": "there is no file",
        f"fednova+{EXAMPLE}:fedexp": "both settle the base method",
    }.items():
        with pytest.raises(UsageError, match=message):
            method(spec)


def test_paths_with_a_plus(tmp_path):
    folder = tmp_path / "c++ code"
    folder.mkdir()
    (folder / "m.py").write_text(EXAMPLE.read_text())
    spec = f"fedprox:mu=1e+1+{folder}/m.py:clipped:norm=2+mse"
    assert pieces_of(spec) == ["fedprox:mu=1e+1", f"{folder}/m.py:clipped:norm=2", "mse"]
    assert isinstance(method(spec), Method)


def test_the_server_s_state_is_made_for_the_population_of_the_federation(ragged):
    told = []

    def init(params, population):
        told.append(population)
        return {}

    list(train(toy_model(), ragged, replace(fedavg(), init=init), rounds=1, batch=8, fraction=0.4))
    assert told == [Population(clients=3, examples=60)]


def test_wrong_bases_and_specs_are_refused():
    for call, message in (
        (lambda: frozen_head(fedavg), r"base is function, not Algorithm: call its factory: fedavg\(\)"),
        (lambda: fedprox(0.1, fedavg), "base is function"),
        (lambda: fedprox(fedavg(), 0.1), "base is float, not Algorithm"),
        (lambda: fedprox(fedavg()), "mu is Algorithm, not a number"),
        (lambda: method("fednova++mse"), "empty piece"),
        (lambda: method("mine:noisy"), "or file.py:function for one of your own"),
        (lambda: method(None), "spec is NoneType, not str"),
        (lambda: method("scaffold:population=10"), "unknown option in .*'population'. There are: weight"),
        (lambda: scaffold(10), "weight is 10: allowed are 'examples'"),
        (lambda: method("fedprox:mu=1:mu=2"), "gives mu twice"),
        (lambda: method("fedopt:lr=-1"), "lr is -1.0: it must be above 0"),
        (lambda: method("fedporx+mine.py:f"), "unknown method 'fedporx': did you mean 'fedprox'"),
        (lambda: method("mine.py"), "name the function in that file too, as in mine.py:function"),
        (lambda: method("fednova+2024/mine.py:f"), "there is no file '2024/mine.py'"),
    ):
        with pytest.raises(UsageError, match=message):
            call()


def test_named_methods_take_a_base(ragged):
    assert (
        gap(last(fedprox(0.3, fednova()), toy_model("batch"), ragged), trained("fednova+fedprox:mu=0.3", ragged)) == 0
    )
