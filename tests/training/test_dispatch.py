"""Training on lanes: what they train is what `sequential` trains, whatever happens meanwhile."""

import itertools
import multiprocessing
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch import nn

from helpers.methods import FEW, METHODS, NORMS, SETTINGS, model_for, sample
from helpers.rounds import gap
from helpers.toys import toy_data, toy_model
from unskew.calibration.ridge import ffc
from unskew.data.datasets import dataset
from unskew.data.partition import Federation
from unskew.errors import UsageError
from unskew.methods.bases import fedavg, feddyn, fednova, moon, scaffold
from unskew.methods.modifications import keep_local
from unskew.methods.optim import cosine
from unskew.methods.presets import fedavgm, fedprox
from unskew.models.networks import Split, build, in_features
from unskew.training.engines.lanes.buffers import LaneBuffers
from unskew.training.engines.lanes.engine import Lanes, check_shareable, program
from unskew.training.engines.lanes.fused.layer import FusedConv, fused
from unskew.training.engines.lanes.timetable import Usage
from unskew.training.engines.sequential import sequential
from unskew.training.simulate import train
from unskew.training.training import Diverged, Round, Training


def pair(name, federation, norm, lanes, **options):
    """The last round by `sequential` and by lanes, beside a run of another seed, rate and number of rounds."""
    given = {"rounds": 3, "epochs": 2, "batch": 8, "lr": 0.05, "weight_decay": 1e-3, "seed": 1, **options}
    model, method = model_for(name, norm), METHODS[name]
    *_, expected = train(model, federation, method, engine=sequential, **given)
    runs = [
        Training(model, federation, method, **given),
        Training(model, federation, method, **{**given, "seed": 2, "rounds": 2, "lr": 0.01}),
    ]
    *_, found = (round for run, round in Lanes(lanes).rounds(runs) if run == 0)
    return expected, found


@pytest.mark.sampled(10, 20)
@pytest.mark.parametrize(("name", "norm"), list(zip(FEW, itertools.cycle(NORMS), strict=False)))
def test_lanes_equal_sequential(name, norm, ragged):
    expected, found = pair(name, ragged, norm, lanes=4)
    assert gap(expected, found) < 1e-9
    assert found.loss == pytest.approx(expected.loss, abs=1e-9)
    assert found.cohort == expected.cohort


@pytest.mark.sampled(0, 24)
@pytest.mark.parametrize(("name", "norm", "lanes", "setting"), sample(NORMS, (1, 3, 8), SETTINGS))
def test_lanes_equal_sequential_in_every_setting(name, norm, lanes, setting, ragged):
    assert gap(*pair(name, ragged, norm, lanes, **SETTINGS[setting])) < 1e-9


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedavg", {"batch": 64}),
        ("moon, body at home", {"fraction": 0.5, "rounds": 5}),
        ("scaffold", {"augment": True}),
        ("fedavg, head at home, in turns", {"steps": 3}),
    ],
)
def test_other_settings(name, options, ragged):
    assert gap(*pair(name, ragged, "batch", 3, **options)) < 1e-9


@given(st.data())
@settings(max_examples=8, deadline=None)
def test_runs_of_any_shape_equal_sequential(data):
    """Ragged clients, several runs, stragglers, partial participation, several numbers of lanes."""
    toys = toy_data(60)

    def run_of(seed):
        ends = sorted(data.draw(st.sets(st.integers(1, 59), min_size=0, max_size=4)))
        parts = torch.arange(60).tensor_split(ends)
        options = {
            "rounds": data.draw(st.integers(1, 3)), "fraction": data.draw(st.sampled_from([1.0, 0.5])),
            "lr": data.draw(st.sampled_from([0.01, 0.1])), "epochs": data.draw(st.integers(1, 2)),
        }  # fmt: skip
        method = (
            moon(data.draw(st.sampled_from([0.1, 1.0])))
            if stateful
            else fedprox(data.draw(st.sampled_from([0.1, 1.0])))
        )
        return Training(toy_model("group"), Federation(toys, parts), method, batch=8, seed=seed, **options)

    stateful = data.draw(st.booleans())
    runs = [run_of(seed) for seed in range(data.draw(st.integers(1, 3)))]
    last = dict(Lanes(data.draw(st.integers(1, 6))).rounds(runs))
    for number, run in enumerate(runs):
        *_, expected = train(
            run.model, run.federation, run.algorithm, rounds=run.rounds, epochs=run.epochs, batch=8, lr=run.lr,
            fraction=run.fraction, seed=run.seed, engine=sequential,
        )  # fmt: skip
        assert gap(expected, last[number]) < 1e-9


@pytest.mark.slow
def test_methods_of_one_step_share_lanes(ragged):
    """FedAvg, FedAvgM and FedNova differ on the server alone, SCAFFOLDs in weights, the others in numbers."""
    given = {"rounds": 2, "epochs": 2, "batch": 8, "lr": 0.05}
    for methods in (
        [fedavg(), fedavgm(0.5), fednova(), fedavg("equal")],
        [fedprox(0.1), fedprox(1.0), fedprox(0.1, fednova()), fedprox(1.0, fednova())],
        [moon(1.0, 0.5), moon(5.0, 0.1)],
        [scaffold(), scaffold("equal")],
        [fedprox(0.1, scaffold()), fedprox(1.0, scaffold("equal"))],
        [feddyn(0.1), feddyn(1.0)],
        [keep_local(fedavg(), in_features), keep_local(fedavgm(0.5), in_features)],
    ):
        runs = [Training(toy_model("batch"), ragged, method, **given, schedule=cosine()) for method in methods]
        assert len({program(run) for run in runs}) == 1
        last = dict(Lanes(5).rounds(runs))
        results = []
        for number, method in enumerate(methods):
            *_, expected = train(toy_model("batch"), ragged, method, engine=sequential, schedule=cosine(), **given)
            assert gap(expected, last[number]) < 1e-9
            results.append(expected)
        for one, other in itertools.combinations(results, 2):
            moved = {**one.params, **(one.clients[0].own if one.clients else {})}
            theirs = {**other.params, **(other.clients[0].own if other.clients else {})}
            assert max((moved[k] - theirs[k]).abs().max() for k in moved) > 1e-9


def test_runs_of_other_programs_are_refused(ragged):
    def run_of(method=None, model=None, federation=ragged, **options):
        method, model = method or fedavg(), model or toy_model("batch")
        return Training(model, federation, method, **{"rounds": 1, "batch": 8, **options})

    own = replace(fedavg(), correct=lambda grads, params, context: grads)
    pulled = replace(fedavg(), pull=lambda name, context: 0.1)
    keeps = replace(fedavg(), enroll=lambda params, model: dict(params))  # the same step, but a memory
    other = Federation(toy_data(), ragged.clients)
    for run, message in (
        (run_of(fedprox(0.1)), "the same local step"),
        (run_of(own), "the same local step"),
        (run_of(pulled), "the same local step"),
        (run_of(keeps), "the same local step"),
        (run_of(model=toy_model("group")), "the same network"),
        (run_of(batch=4), "the same batch and augmentation"),
        (run_of(augment=True), "the same batch and augmentation"),
        (run_of(federation=other), "the same data set"),
    ):
        with pytest.raises(UsageError, match=message):
            check_shareable([run_of(), run])
    check_shareable([run_of(), run_of(lr=1.0, seed=3, rounds=9), run_of(fedavgm(0.1))])


def test_runs_on_lanes_go_on_after_a_stop(ragged):
    def runs():
        return [Training(toy_model("batch"), ragged, scaffold(), rounds=n, batch=8, seed=n) for n in (3, 4)]

    shared = scaffold()
    made = [replace(run, algorithm=shared) for run in runs()]
    whole = [[], []]
    for number, round in Lanes(3).rounds(made):
        whole[number].append(round)
    for stop in ((0, 2), (1, 1), (3, 2)):
        resume = [rounds[reached - 1] if reached else None for rounds, reached in zip(whole, stop, strict=True)]
        last = dict(enumerate(resume)) | dict(Lanes(3).rounds(made, resume))
        for number in (0, 1):
            assert gap(last[number], whole[number][-1]) < 1e-12
    assert not list(Lanes().rounds(made, [rounds[-1] for rounds in whole]))


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_recalibration_on_lanes(name, ragged):
    options = {"rounds": 4, "batch": 8, "lr": 0.05, "recalibrate": (ffc(0.1), 2)}
    method = METHODS[name]
    *_, expected = train(toy_model("batch"), ragged, method, engine=sequential, **options)
    runs = [Training(toy_model("batch"), ragged, method, **options), Training(toy_model("batch"), ragged, method, 3)]
    found = [round for run, round in Lanes().rounds([replace(run, batch=8) for run in runs]) if run == 0]
    assert gap(expected, found[-1]) < 1e-9
    assert [round.number for round in found] == [1, 2, 3, 4]


def test_a_run_that_diverges_does_not_stop_the_others(ragged):
    def run_of(rounds, lr):
        return Training(toy_model(), ragged, fedavg(), rounds=rounds, batch=8, lr=lr, epochs=3)

    runs, last = [run_of(3, 1e30), run_of(4, 0.05), run_of(9, 1e30)], {}
    with pytest.raises(Diverged, match="training diverged in round 1: the loss of client 0 is nan") as caught:
        last.update(Lanes(3).rounds(runs))
    assert caught.value.runs == [0, 2]
    assert list(last) == [1]
    *_, expected = train(toy_model(), ragged, fedavg(), rounds=4, batch=8, lr=0.05, epochs=3, engine=sequential)
    assert gap(expected, last[1]) < 1e-9
    usage = Usage()
    with pytest.raises(Diverged):
        list(Lanes(3, usage=usage).rounds([run_of(1000, 1e30)]))
    assert usage.useful < 100  # and it did not go on for nothing


def test_too_little_memory_halves_the_lanes(ragged, monkeypatch):
    steps, take = [], LaneBuffers.take

    def limited(self, size, times):
        steps.append(size)
        if size > 2 and len(steps) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        take(self, size, times)

    monkeypatch.setattr(LaneBuffers, "take", limited)
    runs = [Training(toy_model("batch"), ragged, scaffold(), rounds=3, batch=8, seed=seed) for seed in range(2)]
    runs = [replace(run, algorithm=runs[0].algorithm) for run in runs]
    with pytest.warns(UserWarning, match="out of memory: going on with 2 lanes"):
        rounds = list(Lanes(5).rounds(runs))
    assert [round.number for run, round in rounds if run == 0] == [1, 2, 3]
    for which, run in enumerate(runs):
        *_, expected = train(
            run.model, ragged, run.algorithm, rounds=3, batch=8, seed=run.seed, engine=sequential
        )  # fmt: skip
        assert gap(expected, dict(rounds)[which]) < 1e-9
    monkeypatch.setattr(LaneBuffers, "take", lambda *_: limited(None, 9, 9))
    with pytest.raises(torch.OutOfMemoryError):
        list(Lanes(1).rounds(runs))


def test_layers_that_draw_are_reproducible_and_leave_the_generator_alone(ragged):
    model = toy_model()
    model.features = nn.Sequential(model.features, nn.Dropout(0.5))
    run = Training(model, ragged, fedavg(), rounds=2, batch=8, lr=0.05)
    before = torch.get_rng_state()
    first, again, other = (
        dict(Lanes(2).rounds([replace(run, seed=seed)]))[0] for seed in (0, 0, 1)
    )  # fmt: skip
    assert torch.equal(before, torch.get_rng_state())
    assert gap(first, again) == 0
    assert gap(first, other) > 1e-6


def spread(rank, folder):
    """One of two processes that share the lanes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = [list(Lanes(4).rounds(runs)) for runs in spread_runs()]
    torch.save([[(run, round._asdict()) for run, round in rounds] for rounds in found], folder / str(rank))
    dist.barrier()
    dist.destroy_process_group()


def spread_runs():
    parts = (torch.arange(0, 20), torch.arange(20, 25), torch.arange(25, 60))
    federation, options = Federation(toy_data(), parts), {"rounds": 3, "batch": 8, "lr": 0.05, "epochs": 2}
    for method in (scaffold(), keep_local(moon(), in_features), fednova()):
        yield [Training(toy_model("batch"), federation, method, **options, seed=seed) for seed in range(3)]


@pytest.mark.slow
def test_two_processes_give_the_same_as_one(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=spread, args=(rank, tmp_path), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        assert process.exitcode == 0
    results = [
        [
            [(run, Round(**about)) for run, about in rounds]
            for rounds in torch.load(tmp_path / str(rank), weights_only=False)
        ]
        for rank in range(2)
    ]
    for case, runs in enumerate(spread_runs()):
        alone = dict(Lanes(4).rounds(runs))
        for rank in range(2):
            there = dict(results[rank][case])
            assert max(gap(alone[run], there[run]) for run in alone) < 1e-12
        assert all(gap(results[0][case][at][1], results[1][case][at][1]) == 0 for at in range(9))


@pytest.mark.parametrize("layout", ["fused", "apart", "joined"])
def test_other_layouts_of_the_step(layout, ragged):
    layers = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    model = Split(nn.Sequential(*layers), nn.Linear(36, 5)).double()
    assert type(fused(model).features[0]) is FusedConv
    options = {"rounds": 2, "batch": 8, "lr": 0.05, "augment": True}
    method = moon(projection=False)
    *_, expected = train(model, ragged, method, engine=sequential, **options)
    found = dict(Lanes(2, layout).rounds([Training(model, ragged, method, **options)]))[0]
    assert gap(expected, found) < 1e-9
    with pytest.raises(UsageError, match="unknown layout 'fuse': did you mean 'fused'"):
        list(Lanes(layout="fuse").rounds([Training(model, ragged, method, **options)]))


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("layout", ["grouped", "apart", "joined"])
def test_bfloat16_by_autocast_is_near(layout, norm, ragged):
    model = toy_model(norm).float()
    run = Training(model, ragged, fedavg(), rounds=2, batch=8, lr=0.05)
    exact, near = (dict(Lanes(precision=kind, layout=layout).rounds([run]))[0] for kind in ("float32", "bfloat16"))
    assert exact.params.keys() == near.params.keys()
    assert 1e-6 < gap(exact, near) < 0.05
    assert all(value.dtype == torch.float32 for value in near.params.values())


def test_usage_is_told(ragged):
    usage = Usage()
    list(Lanes(2, usage=usage).rounds([Training(toy_model(), ragged, fedavg(), rounds=2, batch=8)]))
    assert usage.useful == 2 * (3 + 1 + 5)
    assert 0.5 < usage.occupancy <= 1
    assert usage.lanes == 2
    assert 0.5 < usage.bound <= 1
    assert usage.rate == usage.rate > 0  # it has stopped


def test_a_precision_that_is_none(ragged):
    with pytest.raises(UsageError, match="unknown precision 'half'.*bfloat16"):
        list(Lanes(precision="half").rounds([Training(toy_model(), ragged, fedavg(), rounds=1, batch=8)]))
    before = torch.backends.cudnn.benchmark
    list(Lanes(precision="tf32").rounds([Training(toy_model(), ragged, fedavg(), rounds=1, batch=8)]))
    assert torch.backends.cudnn.benchmark == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "method",
    [scaffold(), moon(projection=False), fedprox(1.0, fednova())],
    ids=["scaffold", "moon", "fednova, proximal"],
)
def test_compiled_lanes_on_a_gpu_equal_sequential_on_a_cpu(method):
    data = toy_data()
    parts = (torch.arange(0, 20), torch.arange(20, 25), torch.arange(25, 60))
    options = {"rounds": 3, "epochs": 2, "batch": 8, "lr": 0.05, "augment": True}
    *_, expected = train(toy_model("batch"), Federation(data, parts), method, engine=sequential, **options)
    there = Federation(data.to("cuda"), tuple(part.cuda() for part in parts))
    *_, (_, found) = Lanes(2).rounds([Training(toy_model("batch"), there, method, **options)])
    assert gap(expected, _on_cpu(found)) < 1e-9


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
@pytest.mark.parametrize("layout", ["grouped", "joined", "apart"])
def test_compiled_lanes_equal_uncompiled_ones(ragged, layout, recwarn):
    run = Training(toy_model("batch"), ragged, scaffold(), rounds=2, batch=8, lr=0.05, augment=True)
    plain, compiled = (dict(Lanes(2, layout, compile=compile).rounds([run]))[0] for compile in (False, True))
    assert gap(plain, compiled) < 1e-9
    assert not recwarn.list  # what the compiler has to say is not for users


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", [fedavg(), moon()], ids=["fedavg", "moon"])
def test_compiled_lanes_of_the_papers_network_are_near_uncompiled_ones(method):
    """In bfloat16 and in the fused layout, as large runs use it.

    Rounding alone sets forms of the step apart by 0.17 to 0.28 of the way they went: random images teach little.
    """
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (600, 3, 32, 32), generator=draw, dtype=torch.uint8).numpy()
    data = dataset("random", x, np.arange(600) % 10, x[:10], np.arange(10)).to("cuda")
    parts = tuple(torch.arange(600, device="cuda").split([300, 40, 260]))
    model = build("cnn", 10, 3, 32, generator=draw)
    run = Training(model, Federation(data, parts), method, rounds=2, epochs=4, batch=64, lr=0.05, augment=True)
    options = {"count": 2, "layout": "fused", "precision": "bfloat16"}
    plain, compiled = (dict(Lanes(compile=compile, **options).rounds([run]))[0] for compile in (False, True))
    start, plain, compiled = (
        torch.cat([value.flatten() for value in tree.values()])
        for tree in (run.net.tree, plain.params, compiled.params)
    )
    assert (plain - compiled).norm() < 0.4 * (plain - start).norm()


def _on_cpu(round):
    def moved(tree):
        return {name: value.cpu() for name, value in tree.items()}

    clients = {id: type(client)(*map(moved, client)) for id, client in round.clients.items()}
    return round._replace(params=moved(round.params), state=moved(round.state), clients=clients)
