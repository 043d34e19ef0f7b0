"""The round loop: settings, resumption, refusals."""

import itertools
import math

import pytest
import torch
from torch import nn

from helpers.methods import METHODS
from helpers.rounds import gap
from helpers.toys import toy_data, toy_model
from unskew.calibration.ridge import ffc
from unskew.calibration.selection import calibrate
from unskew.calibration.virtual import ccvr
from unskew.data.partition import Federation
from unskew.errors import UsageError
from unskew.methods.algorithm import Population
from unskew.methods.bases import fedavg
from unskew.methods.modifications import on_sphere, server
from unskew.methods.optim import SGD, constant, cosine, momentum, multistep
from unskew.methods.presets import fedavgm, fedprox, fedrep
from unskew.models.evaluate import batches
from unskew.models.networks import Split
from unskew.models.variants import clsnorm, spherical
from unskew.seeds import generator
from unskew.statistics.collecting import collect
from unskew.training.engines.batched import batched
from unskew.training.engines.sequential import sequential
from unskew.training.functional import installed
from unskew.training.simulate import train
from unskew.training.training import Diverged, Training


@pytest.mark.sampled(4)
@pytest.mark.parametrize("engine", [sequential, batched])
@pytest.mark.parametrize("name", ["fedavg", "fedadam", "scaffold", "moon, body at home", "feddyn"])
def test_a_run_that_goes_on_from_any_round_ends_the_same(engine, name, ragged):
    method = METHODS[name]
    options = {"rounds": 4, "batch": 8, "lr": 0.05, "fraction": 0.7, "seed": 3, "schedule": cosine(), "engine": engine}
    whole = list(train(toy_model("batch"), ragged, method, **options))
    for stop in (1, 2, 3):
        rest = list(train(toy_model("batch", seed=9), ragged, method, resume=whole[stop - 1], **options))
        assert [r.number for r in rest] == list(range(stop + 1, 5))
        assert gap(whole[-1], rest[-1]) == 0


def test_schedules():
    assert [constant()(r, 4) for r in (1, 4)] == [1, 1]
    assert [cosine()(r, 4) for r in (1, 3)] == pytest.approx([1, 0.5])
    assert cosine()(100, 100) > 0
    assert [multistep()(r, 100) for r in (1, 40, 41, 80, 81, 100)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    reference = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    annealed = torch.optim.lr_scheduler.CosineAnnealingLR(reference, 10)
    for number in range(1, 11):
        assert cosine()(number, 10) == pytest.approx(annealed.get_last_lr()[0])
        reference.step()
        annealed.step()


def test_the_schedule_reaches_the_clients(ragged):
    rates = [r.lr for r in train(toy_model(), ragged, fedavg(), rounds=4, batch=8, lr=0.2, schedule=cosine())]
    assert rates == pytest.approx([0.2 * cosine()(number, 4) for number in (1, 2, 3, 4)])


def test_sgd_is_torch_s():
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(5, generator=draw).double()
    theirs = weight.clone().requires_grad_()
    optimiser = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, weight_decay=0.03)
    sgd, ours, velocity = SGD(0.1, 0.9, 0.03), {"w": weight.clone()}, {"w": torch.zeros(5).double()}
    for _ in range(5):
        grad = torch.randn(5, generator=draw).double()
        theirs.grad = grad.clone()
        optimiser.step()
        velocity = sgd.velocity({"w": grad}, ours, velocity)
        ours = {"w": ours["w"] - sgd.lr * velocity["w"]}
    assert ours["w"] == pytest.approx(theirs.detach().numpy(), abs=1e-14)


def test_training_learns(ragged):
    losses = [r.loss for r in train(toy_model(), ragged, fedavg(), rounds=15, epochs=4, batch=8, lr=0.05)]
    assert losses[-1] < 0.6 * losses[0]


def test_divergence_is_reported_with_its_remedy(ragged):
    with pytest.raises(Diverged, match="round 1: the loss of client .* lower the learning rate"):
        list(train(toy_model("none"), ragged, fedavg(), rounds=3, batch=8, lr=1e200))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"batch": 0}, "batch is 0"),
        ({"lr": -0.1}, "lr is -0.1"),
        ({"lr": math.nan}, "lr is nan"),
        ({"momentum": 1.5}, "momentum is 1.5"),
        ({"weight_decay": -1}, "weight_decay is -1"),
        ({"fraction": 1.2}, "fraction is 1.2"),
        ({"fraction": 0}, "fraction is 0"),
    ],
)
def test_settings_that_can_not_be_meant_are_refused(options, message, ragged):
    with pytest.raises(UsageError, match=message):
        next(train(toy_model(), ragged, fedavg(), **{"rounds": 1, **options}))


def test_an_empty_client_and_a_model_of_other_classes_are_refused(ragged):
    empty = Federation(ragged.data, (*ragged.clients, torch.arange(0)))
    with pytest.raises(UsageError, match=r"clients \[3\] hold no examples"):
        next(train(toy_model(), empty, fedavg(), rounds=1))
    with pytest.raises(UsageError, match=r"output has shape \(2, 7\), but the data have 5 classes"):
        next(train(toy_model(classes=7), ragged, fedavg(), rounds=1))


def test_methods_refuse_what_can_not_be_meant():
    for bad in (lambda: fedprox(-1), lambda: fedavgm(1.0), lambda: fedavg("size"), lambda: fedprox(math.nan)):
        with pytest.raises(UsageError):
            bad()
    with pytest.raises(UsageError, match="another name"):
        server(server(fedavg(), momentum(0.1)), momentum(0.1)).init({"w": torch.zeros(1)}, Population(1, 1))


def test_two_servers_with_names_of_their_own_both_act(ragged):
    def last(method):
        return list(train(toy_model(), ragged, method, rounds=3, batch=8, lr=0.05))[-1]

    once = server(fedavg(), momentum(0.3))
    twice = server(once, momentum(0.0), name="outer")
    both = server(once, momentum(0.3), name="outer")
    assert max((last(twice).params[k] - v).abs().max() for k, v in last(once).params.items()) < 1e-12
    assert max((last(both).params[k] - v).abs().max() for k, v in last(once).params.items()) > 1e-4


def test_clients_smaller_than_a_batch_train(ragged):
    tiny = Federation(toy_data(), (torch.tensor([0]), torch.tensor([1, 2])))
    for norm in ("group", "batch"):
        last = list(train(toy_model(norm), tiny, fedavg(), rounds=1, batch=16, lr=0.1))[-1]
        assert (last.params["classifier.weight"] - toy_model(norm).classifier.weight).abs().max() > 1e-4


def test_cohorts_differ_from_round_to_round(ragged):
    cohorts = [r.cohort for r in train(toy_model(), ragged, fedavg(), rounds=8, batch=32, fraction=0.3)]
    assert len(set(cohorts)) > 1
    assert all(len(cohort) == 1 for cohort in cohorts)


def test_the_loss_of_a_round_is_weighted_by_examples(ragged):
    last = list(train(toy_model(), ragged, fedavg(), rounds=1, batch=8, lr=0.0))[-1]
    alone = [
        list(train(toy_model(), Federation(ragged.data, (rows,)), fedavg(), rounds=1, batch=1, lr=0.0))[-1].loss
        for rows in ragged.clients
    ]
    assert last.loss == pytest.approx((20 * alone[0] + 5 * alone[1] + 35 * alone[2]) / 60, rel=0.1)
    assert abs(last.loss - sum(alone) / 3) > 1e-3


# ---------------------------------------------------------------------------------------------- FFC during training


@pytest.mark.parametrize("engine", [sequential, batched])
def test_recalibration_every_few_rounds_is_calibrating_and_going_on(engine, ragged):
    """SphereFed C.2: after every second round all clients send their sums, and training goes on from the new head."""
    model, algorithm = spherical(toy_model("batch")), on_sphere(fedavg())
    settings = {"rounds": 5, "epochs": 1, "batch": 8, "lr": 0.5, "seed": 1, "engine": engine}
    rounds = list(train(model, ragged, algorithm, recalibrate=(ffc(1.0), 2), **settings))
    expected = None
    for number in (1, 2, 3, 4, 5):
        *_, expected = itertools.islice(train(model, ragged, algorithm, resume=expected, **settings), 1)
        if number in (2, 4):
            trained = installed(model, expected.params)
            inputs = [batches(ragged.data, rows, dtype=torch.float64) for rows in ragged.clients]
            stats = [collect(trained, site, 5, "pooled") for site in inputs]
            head = calibrate(trained, stats, ffc(1.0)).classifier.weight.detach()
            expected = expected._replace(params={**expected.params, "classifier.weight": head})
        assert gap(rounds[number - 1], expected) < 1e-12
    assert torch.equal(rounds[0].params["classifier.weight"], model.classifier.weight)
    assert torch.equal(rounds[2].params["classifier.weight"], rounds[1].params["classifier.weight"])  # fixed between


@pytest.mark.parametrize("calibrator", [ffc(0.1), ccvr(samples=20, epochs=1)])
def test_recalibration_of_a_head_that_learns(calibrator, ragged):
    rounds = list(train(toy_model(), ragged, fedavg(), rounds=2, batch=8, seed=4, recalibrate=(calibrator, 1)))
    resumed = rounds[0]
    *_, plain = train(toy_model(), ragged, fedavg(), rounds=2, batch=8, seed=4, resume=resumed)
    trained = installed(toy_model(), plain.params)
    stats = collect(trained, batches(ragged.data, dtype=torch.float64), 5, calibrator.form)
    expected = calibrate(trained, stats, calibrator, generator(4, "recalibrate", 2)).classifier
    assert rounds[1].params["classifier.weight"] == pytest.approx(expected.weight.detach().numpy(), abs=1e-9)
    assert rounds[1].params["classifier.bias"] == pytest.approx(expected.bias.detach().numpy(), abs=1e-9)


def test_recalibration_goes_on_after_a_stop(ragged):
    options = {"rounds": 4, "batch": 8, "recalibrate": (ccvr(samples=20, epochs=1), 2)}
    whole = list(train(toy_model(), ragged, fedavg(), **options))
    for stop in (1, 2, 3):
        *_, last = train(toy_model(), ragged, fedavg(), resume=whole[stop - 1], **options)
        assert gap(last, whole[-1]) == 0


def test_recalibration_that_can_not_be_meant_is_refused(ragged):
    dropping = Split(toy_model().features, nn.Sequential(nn.Dropout(), nn.Linear(8, 5).double()))
    for model, method, recalibrate, message in (
        (toy_model(), fedavg(), (ffc, 2), r"give a calibrator and a number: \(ffc\(\), 10\)"),
        (toy_model(), fedavg(), ffc(), "recalibrate is Calibrator: give a calibrator and a number"),
        (toy_model(), fedavg(), (ffc(),), "recalibrate is tuple: give a calibrator and a number"),
        (toy_model(), fedavg(), (ffc(), "2"), "is str, not a number"),
        (toy_model(), fedavg(), (ffc(), 1.5), "and whole"),
        (toy_model(), fedavg(), (ffc(), 9), "every 9 rounds, but there are 2: it would never happen"),
        (dropping, fedavg(), (ffc(), 2), "would change the classifier's form"),
        (toy_model(), fedavg(), (ffc(), 0), "it must be at least 1"),
        (toy_model(), fedavg(), (ffc(transform="unit"), 2), "would change the classifier's form"),
        (clsnorm(toy_model()), fedavg(), (ffc(), 2), "would change the classifier's form"),
        (toy_model(), fedrep(), (ffc(), 2), "keeps parts of the model at home"),
        (toy_model(), fedavg(), (ccvr(5, transform="relu", when="after"), 1), "would change the classifier's form"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            list(train(model, ragged, method, rounds=2, batch=8, recalibrate=recalibrate))


def test_a_proximal_term_that_leads_past_the_start_is_refused():
    with pytest.raises(UsageError, match="lr \\* mu is 0.5 \\* 4"):
        list(
            train(
                toy_model(), Federation(toy_data(), tuple(torch.arange(60).split(20))), fedprox(4.0), rounds=1, lr=0.5
            )
        )


def test_a_round_s_loss_is_the_mean_over_examples(ragged):
    training = Training(toy_model(), ragged, fedavg(), rounds=1, batch=8)
    round = training.start()._replace(cohort=(0, 2), number=1)
    assert training.judged(round, [1.0, 3.0], True, 0.0).loss == pytest.approx((20 * 1 + 35 * 3) / 55)
