"""Personal models: each client's own, made after training, and scored on what that client holds out.

The protocol is SphereFed's appendix B: `federate(data, partition, held_out=0.15)` merges training and test examples,
cuts them, and lets each client hold out 15 % of its own; results are the mean and the standard deviation of the
clients' accuracies. A client starts from the server's model with the tensors that it kept at home, and then takes one
of four ways: it leaves that as it is (`own`: LG-FedAvg, FedRep), fine-tunes the head (`head`: FedBABU, SphereFed with
SGD), fine-tunes all (`all`: FedAvg with local fine-tuning), or solves for its own head (`ffc`: SphereFed with a local
FFC).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad

from unskew.calibration import ridge as least_squares
from unskew.calibration.calibrator import plain, with_classifier
from unskew.calibration.retraining import retrain
from unskew.data.partition import Federation
from unskew.errors import UsageError, check_number
from unskew.methods.algorithm import Algorithm, never
from unskew.methods.bases import fedavg
from unskew.methods.optim import SGD
from unskew.models.evaluate import Scores, batches, score
from unskew.models.networks import Split, evaluating
from unskew.models.variants import NormalisedLinear
from unskew.seeds import generator
from unskew.statistics.collecting import collect
from unskew.training.client import at_home, enter, make_visit
from unskew.training.functional import installed, network
from unskew.training.plan import make_plan
from unskew.training.settings import RULES
from unskew.training.training import Diverged, Round


class Home(NamedTuple):
    """What a client has for making a model of its own."""

    id: int
    federation: Federation
    algorithm: Algorithm  # that the federation trained with
    round: int  # the last one
    seed: int

    @property
    def rows(self) -> Tensor:
        """Its training examples."""
        return self.federation.clients[self.id]

    def batches(self, model: Split) -> Iterator[tuple[Tensor, Tensor]]:
        """Its training examples, as the model takes them."""
        return batches(self.federation.data, self.rows, dtype=next(model.parameters()).dtype)


Way = Callable[[Split, Home], Split]  # the client's model as it stands -> its personal model


def own() -> Way:
    """Each client's model as it stands, with the tensors that it kept at home: for lg_fedavg and fedrep."""
    return _as_it_stands


def _as_it_stands(model: Split, home: Home) -> Split:
    return model


def head(epochs: int = 5, lr: float = 0.01, batch: int = 64, momentum: float = 0.9) -> Way:
    """Fine-tune the head by SGD on the method's own loss; the features are fixed and in eval mode."""
    _check(epochs=epochs, lr=lr, batch=batch, momentum=momentum)

    def fit(model: Split, home: Home) -> Split:
        if isinstance(model.classifier, NormalisedLinear):
            raise UsageError("clsnorm's classifier is not fine-tuned alone: fine-tune the whole model (all)")
        with evaluating(model), torch.no_grad():
            features, labels = zip(*((model.features(x), y) for x, y in home.batches(model)), strict=True)

        def slope(logits: Tensor, targets: Tensor) -> Tensor:
            slopes: Tensor = grad(home.algorithm.criterion)(logits.T, targets.argmax(0))  # of the mean
            return slopes.T * len(slopes)

        old, sgd, draw = plain(model.classifier), SGD(lr, momentum), generator(home.seed, "personal", home.id)
        tuned = retrain(old, torch.cat(features), torch.cat(labels), epochs, batch, sgd, draw, slope)
        return with_classifier(model, tuned)

    return fit


def everything(epochs: int = 5, lr: float = 0.01, batch: int = 64, momentum: float = 0.9) -> Way:
    """Fine-tune all that the method trains, by SGD on its own loss: a round that nobody shares."""
    _check(epochs=epochs, lr=lr, batch=batch, momentum=momentum)

    def fit(model: Split, home: Home) -> Split:
        alone = replace(fedavg(), criterion=home.algorithm.criterion, frozen=home.algorithm.frozen, shared=never)
        net, data = network(model), home.federation.data
        todo = make_plan(home.rows, batch, home.seed, home.round + 1, home.id, epochs=epochs)
        visit = make_visit(net, alone, SGD(lr, momentum), data, net.tree, {})
        visited = visit(home.id, enter(net, alone, net.tree), todo, len(home.rows))
        return installed(model, visited.client.own)

    return fit


def ffc(ridge: float = 0.0) -> Way:
    """Solve for the head of least squared error on the client's own examples (Equation 7)."""
    calibrator = least_squares.ffc(ridge)

    def fit(model: Split, home: Home) -> Split:
        stats = collect(model, home.batches(model), home.federation.data.classes, calibrator.form)
        return with_classifier(model, calibrator(stats, model.classifier, torch.Generator()))

    return fit


ways: dict[str, Callable[..., Way]] = {"own": own, "head": head, "all": everything, "ffc": ffc}


def personal_models(
    model: Split, federation: Federation, algorithm: Algorithm, last: Round, way: Way, seed: int = 0
) -> Iterator[Split]:
    """The personal model of each client in turn, after the last round of training `model`.

    >>> data = unskew.load("digits")
    >>> federation = unskew.federate(data, unskew.iid(4), held_out=0.2)
    >>> model = unskew.build("small-cnn", data.classes, data.channels, data.size)
    >>> last = next(unskew.train(model, federation, unskew.fedbabu(), rounds=1, steps=1))
    >>> len(list(unskew.personal_models(model, federation, unskew.fedbabu(), last, ffc())))
    4
    """
    if not callable(way):
        raise UsageError(f"way is {way!r}: give one of its functions, such as head(), everything(), ffc() or own()")
    if way is _as_it_stands and not at_home(network(model), algorithm, last.params):
        raise UsageError(
            "the method has no local part, so that all clients' own models are the same one: let them fine-tune it "
            "(head, all or ffc), or train with lg_fedavg or fedrep"
        )
    params = algorithm.final(last.params, last.state)
    for id in range(len(federation.clients)):
        kept = last.clients[id].own if id in last.clients else {}
        home = Home(id, federation, algorithm, last.number, seed)
        made = way(installed(model, {**params, **kept}), home)
        if not all(torch.isfinite(value).all() for value in made.parameters()):
            raise Diverged(f"the personal model of client {id} is NaN or infinite: lower its learning rate")
        yield made


class Personal(NamedTuple):
    """How the clients' personal models do on what each holds out.

    >>> one, other = unskew.Scores(torch.eye(2, dtype=torch.int64)), unskew.Scores(torch.tensor([[1, 1], [0, 2]]))
    >>> unskew.Personal((one, other)).mean
    0.875
    """

    scores: tuple[Scores, ...]  # one a client

    @property
    def by_client(self) -> list[float | None]:
        """The accuracy of each client; None of one that holds nothing out."""
        return [scores.accuracy if scores.confusion.sum() else None for scores in self.scores]

    @property
    def accuracies(self) -> list[float]:
        """Those of the clients that hold something out."""
        return [value for value in self.by_client if value is not None]

    @property
    def mean(self) -> float:
        """The mean of the clients' accuracies: each client counts the same."""
        return statistics.fmean(self.accuracies)

    @property
    def deviation(self) -> float:
        """Their standard deviation; these clients are all there are, so that it divides by their number."""
        return statistics.pstdev(self.accuracies)


def score_personal(models: Iterator[Split], federation: Federation) -> Personal:
    """Score each client's model on what that client holds out.

    >>> federation = unskew.federate(unskew.load("digits"), unskew.iid(4), held_out=0.2)
    >>> model = unskew.build("small-cnn", classes=10, channels=1, size=8)
    >>> len(unskew.score_personal(iter([model] * 4), federation).by_client)
    4
    """
    if not any(map(len, federation.tests)):
        raise UsageError("the clients hold nothing out: cut the data by federate(..., held_out=0.15)")
    data = federation.data
    return Personal(
        tuple(
            score(model, batches(data, rows, dtype=next(model.parameters()).dtype), data.classes)
            for model, rows in zip(models, federation.tests, strict=True)
        )
    )


def _check(**settings: float) -> None:
    for name, value in settings.items():
        check_number(name, value, RULES[name])
