"""Workers: bit for bit what `sequential` gives on one thread, and nobody left behind, however a training ends."""

import gc
import itertools
import multiprocessing
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from helpers.commands import blobs, child_of, result_of, tiny, unskew
from helpers.methods import METHODS, NORMS, model_for, sample
from helpers.rounds import everything
from helpers.toys import toy_data, toy_model
from unskew import Experiment, Workers, build, dataset, fedavg, ffc, run, scaffold, sequential, train
from unskew.data.partition import Federation
from unskew.errors import UsageError
from unskew.system.machine import threads
from unskew.training.engines.workers import Shared, check_workers

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or torch.accelerator.device_count() > 0, reason="workers are for Linux without a GPU"
)

SETTINGS = {"rounds": 3, "batch": 8, "lr": 0.05, "weight_decay": 1e-3, "seed": 1}


@pytest.fixture
def many() -> Federation:
    """Seven clients of 2 to 20 examples."""
    return Federation(toy_data(), tuple(torch.arange(60).split([7, 2, 11, 20, 4, 6, 10])))


@pytest.fixture(autouse=True)
def _nobody_is_left():
    yield
    assert not multiprocessing.active_children()


def assert_same(model, federation, method, processes=2, **options):
    """Every round of a training is the same by workers and by `sequential`, to the last bit."""
    options = {**SETTINGS, **options}
    with threads(1):
        expected = list(train(model, federation, method, engine=sequential, **options))
    got = list(train(model, federation, method, engine=Workers(processes), **options))
    assert len(got) == len(expected)
    for one, other in zip(expected, got, strict=True):
        assert (one.number, one.cohort, one.loss, one.lr) == (other.number, other.cohort, other.loss, other.lr)
        trees = everything(one), everything(other)
        assert list(trees[0]) == list(trees[1])
        for a, b in zip(*(tree.values() for tree in trees), strict=True):
            assert (a.dtype, a.stride()) == (b.dtype, b.stride())
            assert torch.equal(a, b)


# ---------------------------------------------------------------------------------------------- the same bits

FIRST = [
    ("fedavg", "none"), ("fedavgm", "group"), ("fednova", "batch"), ("scaffold", "batch"), ("moon", "batch"),
    ("feddyn", "group"), ("moon, body at home", "batch"), ("scaffold, head at home, in turns", "batch"),
    ("fedprox, on sphere", "none"), ("scaffold, server of two states", "batch"),
]  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "norm"), FIRST)
def test_workers_equal_sequential(name, norm, ragged):
    assert_same(model_for(name, norm), ragged, METHODS[name])


@pytest.mark.sampled(0, 12)
@pytest.mark.parametrize(("name", "norm"), sample(NORMS))
def test_workers_equal_sequential_for_every_method(name, norm, ragged):
    assert_same(model_for(name, norm), ragged, METHODS[name], fraction=0.7, augment=True)


@pytest.mark.parametrize("processes", [3, 50])
def test_more_clients_than_workers_and_fewer(processes, many):
    assert_same(toy_model("batch"), many, scaffold(), processes, fraction=0.7)


@pytest.mark.parametrize("options", [{"augment": True}, {"steps": 3}, {"recalibrate": (ffc(), 2)}])
def test_other_settings(options, ragged):
    assert_same(toy_model("batch"), ragged, METHODS["moon"], **options)


def test_layers_that_draw_and_odd_memory_formats(ragged):
    model = toy_model("batch").to(memory_format=torch.channels_last)
    model.features.append(nn.Dropout(0.5))
    assert_same(model, ragged, scaffold())


def test_workers_take_one_thread_whatever_torch_has_here(ragged):
    def on_one_thread(function):
        def checked(*arguments):
            assert torch.get_num_threads() == 1
            return function(*arguments)

        return checked

    method = METHODS["scaffold"]
    names = ("init", "enroll", "criterion", "correct", "report", "update")
    checked = replace(method, **{name: on_one_thread(getattr(method, name)) for name in names})
    with threads(2):
        torch.randn(400, 400).mm(torch.randn(400, 400))  # torch's threads are there when workers are forked
        for _ in train(toy_model(), ragged, checked, engine=Workers(2), **SETTINGS):
            assert torch.get_num_threads() == 2
        assert_same(toy_model("batch"), ragged, method)


def test_a_paper_s_network_beside_torch_s_threads():
    """In float32, by the libraries' fast paths, which choose by threads and by where a tensor lies."""
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 256, (90, 3, 32, 32)).astype(np.uint8), np.arange(90) % 10
    data = dataset("random", x, y, x[:10], y[:10], [str(label) for label in range(10)])
    model = build("cnn", 10, 3, 32, generator=torch.Generator().manual_seed(0))
    with threads(2):
        model(torch.randn(8, 3, 32, 32)).sum().backward()
        assert_same(model, Federation(data, tuple(torch.arange(90).split([40, 20, 30]))), scaffold(), rounds=2)


def test_a_training_goes_on(many):
    whole = list(train(toy_model("batch"), many, scaffold(), engine=Workers(2), fraction=0.5, **SETTINGS))
    for before in whole:
        rest = train(toy_model("batch"), many, scaffold(), engine=Workers(2), fraction=0.5, resume=before, **SETTINGS)
        for expected, got in zip(whole[before.number :], rest, strict=True):
            assert all(torch.equal(a, everything(got)[name]) for name, a in everything(expected).items())


def test_two_trainings_at_once_and_in_a_thread(ragged):
    def go():
        options = {"engine": Workers(2), **SETTINGS}
        return zip(*(train(toy_model(), ragged, METHODS[name], **options) for name in ("moon", "fedavg")), strict=True)

    with ThreadPoolExecutor(1) as pool:
        first, second = pool.submit(lambda: list(go())).result(), list(go())
    for one, other in zip(itertools.chain(*first), itertools.chain(*second), strict=True):
        assert all(torch.equal(value, everything(other)[name]) for name, value in everything(one).items())


def test_the_longest_clients_come_first_and_a_free_worker_takes_the_next(many, tmp_path):
    def noting(params, context, work):
        with (tmp_path / "order").open("a") as file:
            print(os.getpid(), int(work.examples), file=file)
        return fedavg().report(params, context, work)

    list(train(toy_model(), many, replace(fedavg(), report=noting), engine=Workers(1), rounds=1, batch=1))
    sizes = [int(line.split()[1]) for line in (tmp_path / "order").read_text().splitlines()]
    assert sizes == sorted(sizes, reverse=True)
    (tmp_path / "order").unlink()
    list(train(toy_model(), many, replace(fedavg(), report=noting), engine=Workers(3), rounds=4, batch=1))
    assert len({line.split()[0] for line in (tmp_path / "order").read_text().splitlines()}) == 3  # for all rounds


def test_shared_memory_keeps_any_tensor_and_grows():
    shared = Shared()
    for size in (3, 5000, 7):
        tree = {
            "float": torch.randn(size, 2), "turned": torch.randn(2, size, 3).permute(2, 0, 1),
            "empty": torch.zeros(0, 4), "number": torch.tensor(3), "truth": torch.rand(size) > 0.5,
            "double": torch.randn(1).double(), "wide": torch.randn(1, 3).expand(size, 3),
            "half": torch.randn(size).bfloat16(),
        }  # fmt: skip
        read = shared.read(shared.write(tree))
        assert list(read) == list(tree)
        for name, value in tree.items():
            assert (read[name].dtype, read[name].stride()) == (value.dtype, value.clone().stride())
            assert torch.equal(read[name], value)
            assert read[name].data_ptr() % 64 == 0
    shared.close()


# ---------------------------------------------------------------------------------------------- what goes wrong


class Odd(Exception):
    """An error that can't be pickled."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def failing(how, after=3):
    """A method whose third step goes wrong in each worker."""
    steps = itertools.count(1)

    def criterion(logits, labels):
        if next(steps) == after:
            how()
        return fedavg().criterion(logits, labels)

    return replace(fedavg(), criterion=criterion)


def raising(error):
    def how():
        raise error

    return how


def failed(kind, how, federation):
    with pytest.raises(kind) as failure:
        list(train(toy_model(), federation, failing(how), engine=Workers(2), **SETTINGS))
    return failure.value


@pytest.mark.parametrize(
    "error", [KeyError("cheese"), UsageError("cheese"), OSError(28, "cheese"), SystemExit("cheese")]
)
def test_an_error_arrives_as_it_was_raised(error, ragged):
    caught = failed(type(error), raising(error), ragged)
    assert str(caught) == str(error)
    assert caught.args == error.args
    assert "in how" in str(caught.__cause__)
    if isinstance(error, Exception):
        assert caught.__notes__[0] in [f"while training client {id}, step 3 of {n}" for id, n in ((0, 3), (2, 5))]
        assert caught.__notes__[1] == "in round 1 of 3"


def test_an_error_that_cannot_travel_is_told(ragged):
    caught = failed(RuntimeError, raising(Odd("cheese", "wine")), ragged)
    assert str(caught) == "Odd: cheese and wine"
    assert caught.__notes__[1] == "in round 1 of 3"


@pytest.mark.parametrize(
    ("how", "words"),
    [(lambda: os.kill(os.getpid(), signal.SIGKILL), "died (SIGKILL)"), (lambda: os._exit(3), "died (exit code 3)")],
)
def test_a_worker_that_dies_is_told_with_its_client(how, words, ragged):
    text = str(failed(ChildProcessError, how, ragged))
    assert words in text
    assert text.startswith(("the worker of client 0 ", "the worker of client 2 "))
    assert "use --engine sequential" in text


def test_a_worker_that_dies_between_rounds(ragged):
    rounds = train(toy_model(), ragged, fedavg(), engine=Workers(2), **SETTINGS)
    next(rounds)
    for worker in multiprocessing.active_children():
        worker.kill()
        worker.join()
    with pytest.raises(ChildProcessError, match=r"the worker of client 2 died \(SIGKILL\)"):
        next(rounds)


def test_refusals(ragged, monkeypatch):
    for processes in (0, -1, 1.5, "two"):
        with pytest.raises(UsageError, match="processes is"):
            Workers(processes)
    with pytest.raises(UsageError, match="engine is the class Workers: make one"):
        next(train(toy_model(), ragged, fedavg(), rounds=1, engine=Workers))
    with pytest.raises(
        UsageError, match="the CPU, but the data are on cuda:0: use --engine sequential, .* --device cpu"
    ):
        check_workers(torch.device("cuda:0"))
    with monkeypatch.context() as patch:
        patch.setattr(torch.accelerator, "device_count", lambda: 1)
        with pytest.raises(UsageError, match="where it sees a GPU: hide it by CUDA_VISIBLE_DEVICES= "):
            check_workers(torch.device("cpu"))
    for platform in ("win32", "darwin"):
        monkeypatch.setattr(sys, "platform", platform)
        with pytest.raises(UsageError, match=f"engine workers .* this is {platform}: use --engine sequential"):
            next(train(toy_model(), ragged, fedavg(), rounds=1, engine=Workers()))


def test_a_process_of_a_pool_is_refused():
    pool = multiprocessing.get_context("fork").Pool(1)
    with pool, pytest.raises(UsageError, match="in a process of a pool"):
        pool.apply(check_workers, [torch.device("cpu")])
    pool.join()


# ---------------------------------------------------------------------------------------------- how a training ends


def test_workers_last_as_long_as_the_iterator_and_files_do_not_pile_up(many):
    gc.collect()
    before = files()
    rounds = train(toy_model(), many, scaffold(), engine=Workers(3), **{**SETTINGS, "rounds": 9})
    assert not multiprocessing.active_children()
    kept, seen = [], []
    for _ in range(5):
        kept.append(next(rounds))
        seen.append((sorted(worker.pid for worker in multiprocessing.active_children()), files()))
    pids = seen[0][0]
    assert len(pids) == 3
    assert seen[1:] == [seen[1]] * 4
    assert seen[1][0] == pids
    rounds.close()
    assert files() == before
    assert not multiprocessing.active_children()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)  # no zombies either


def files():
    return len(os.listdir("/proc/self/fd"))


SLOW = """
import os, signal, time
from dataclasses import replace
from pathlib import Path
from unskew import fedavg

def slow():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell would ignore it

    def criterion(logits, labels):
        (Path(__file__).parent / f"{os.getpid()}.pid").touch()
        time.sleep(60)

    return replace(fedavg(), criterion=criterion)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_workers_end_with_their_parent(sent, tmp_path):
    """In the middle of a round. Ctrl-C reaches all of a terminal's processes, and is the parent's business alone."""
    told = sent is not signal.SIGKILL
    (tmp_path / "mine.py").write_text(SLOW)
    options = tiny(blobs(tmp_path / "blobs.npz"), engine="workers", method=f"{tmp_path / 'mine.py'}:slow")
    process = child_of(["run", *options, "--out", str(tmp_path / "run")], tmp_path / "errors")
    until = time.monotonic() + 60
    count = min(4, len(os.sched_getaffinity(0)))
    while len(list(tmp_path.glob("*.pid"))) < count:
        assert process.is_alive()
        assert time.monotonic() < until
        time.sleep(0.01)
    workers = [int(path.stem) for path in tmp_path.glob("*.pid")]
    if told:
        for pid in workers:
            os.kill(pid, sent)
        time.sleep(0.1)
    assert all(map(runs, workers))
    os.kill(process.pid, sent)
    process.join(20)
    assert process.exitcode == (128 + sent if told else -sent)
    if told:
        assert not any(map(runs, workers))
        assert "stopped after round 0 of 3; go on with" in (tmp_path / "errors").read_text()
    until = time.monotonic() + 2
    while any(map(runs, workers)):
        assert time.monotonic() < until
        time.sleep(0.01)


def runs(pid):
    """Whether a process is there and no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# ---------------------------------------------------------------------------------------------- on the command line


@pytest.mark.parametrize(
    "changed", [{"method": "scaffold", "fraction": 0.5}, {"method": "moon", "recalibrate": "ffc:every=2"}]
)
def test_a_run_by_workers_is_a_run_by_sequential(tmp_path, changed):
    data, found = blobs(tmp_path / "blobs.npz"), {}
    for engine in ("sequential", "workers"):
        answer = unskew("run", *tiny(data, engine=engine, **changed), "--out", tmp_path / engine)
        assert answer.code == 0, answer.err
        found[engine] = result_of(tmp_path / engine)
    assert found["workers"]["bits"] == found["sequential"]["bits"]
    start, *records = found["workers"]["records"]
    assert start["experiment"]["engine"] == "workers"
    assert records == found["sequential"]["records"][1:]
    assert {**start, "experiment": 0, "digest": 0} == {
        **found["sequential"]["records"][0],
        "experiment": 0,
        "digest": 0,
    }


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path):
    data = str(blobs(tmp_path / "blobs.npz"))
    experiment = Experiment(data, clients=4, alpha=1.0, rounds=3, epochs=1, batch=8, calibrate="ffc", method="scaffold",
                            fraction=0.5, engine="workers")  # fmt: skip
    list(run(experiment, tmp_path / "whole"))
    for stop in (1, 3):
        running = run(experiment, tmp_path / str(stop))
        list(itertools.islice(running, stop))
        assert len(multiprocessing.active_children()) == (stop > 1) * min(2, len(os.sched_getaffinity(0)))
        running.close()
        assert not multiprocessing.active_children()
        list(run(experiment, tmp_path / str(stop), resume=True))
        assert result_of(tmp_path / str(stop)) == result_of(tmp_path / "whole")


MINE = """
from dataclasses import replace
from unskew import fedavg

def mine():
    def correct(grads, params, context):
        print("cheese")
        return {name: grads["nonsense"] for name in grads}
    return replace(fedavg(), correct=correct)
"""


def test_a_method_of_one_s_own_that_fails_is_told_with_its_line_and_what_it_printed(tmp_path, capfd):
    (tmp_path / "mine.py").write_text(MINE)
    options = tiny(blobs(tmp_path / "blobs.npz"), engine="workers", method=f"{tmp_path / 'mine.py'}:mine")
    answer = unskew("run", *options, "--out", tmp_path / "run")
    assert answer.code == 2
    assert "which fails: KeyError: 'nonsense'" in answer.err
    assert f"{tmp_path / 'mine.py'}, line 8" in answer.err
    assert "cheese" in capfd.readouterr().out


def test_a_gpu_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *shape, device="cpu", **options: empty(*shape, **options)
    )  # as if it were
    answer = unskew("run", *tiny(blobs(tmp_path / "b.npz"), engine="workers", device="cuda"), "--out", tmp_path / "run")
    assert answer.code == 2
    assert "engine workers trains on the CPU, but the data are on cuda: use --engine sequential" in answer.err
    assert not (tmp_path / "run").exists()
