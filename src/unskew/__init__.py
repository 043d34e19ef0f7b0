"""Unskew: federated classifiers that stay accurate when clients' data differ.

    import unskew

    data = unskew.load("digits")
    federation = unskew.federate(data, unskew.dirichlet(clients=10, alpha=0.1))
    model = unskew.build("small-cnn", classes=data.classes, channels=data.channels, size=data.size)
    for round in unskew.train(model, federation, unskew.fedavg(), rounds=20):
        print(round.number, round.loss)

Names load when they are first used, so that importing this package costs nothing; what the core needs is torch and
numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unskew.algorithms import (
        Algorithm as Algorithm,
        alternating as alternating,
        clsprox as clsprox,
        fedadagrad as fedadagrad,
        fedadam as fedadam,
        fedavg as fedavg,
        fedavgm as fedavgm,
        feddyn as feddyn,
        fednova as fednova,
        fedopt as fedopt,
        fedprox as fedprox,
        fedyogi as fedyogi,
        frozen_head as frozen_head,
        keep_local as keep_local,
        moon as moon,
        on_sphere as on_sphere,
        proximal as proximal,
        scaffold as scaffold,
        server as server,
    )
    from unskew.data import Dataset as Dataset, dataset as dataset, load as load
    from unskew.engine import batched as batched, installed as installed, sequential as sequential
    from unskew.errors import DataError as DataError, UnskewError as UnskewError, UsageError as UsageError
    from unskew.evaluate import Scores as Scores, batches as batches, score as score
    from unskew.experiments import Experiment as Experiment, load_model as load_model, run as run
    from unskew.heads import (
        Calibrator as Calibrator,
        calibrate as calibrate,
        ccvr as ccvr,
        ffc as ffc,
        oracle as oracle,
    )
    from unskew.models import Split as Split, build as build, split as split
    from unskew.optim import (
        adagrad as adagrad,
        adam as adam,
        constant as constant,
        cosine as cosine,
        momentum as momentum,
        multistep as multistep,
        yogi as yogi,
    )
    from unskew.partition import (
        Federation as Federation,
        classes as classes,
        dirichlet as dirichlet,
        federate as federate,
        iid as iid,
        quantity as quantity,
        shards as shards,
    )
    from unskew.simulate import Round as Round, train as train
    from unskew.spheres import clsnorm as clsnorm, spherical as spherical
    from unskew.statistics import FeatureStats as FeatureStats, collect as collect
    from unskew.sums import Sum as Sum, plain_sum as plain_sum

__version__ = "0.1.0"

_HOMES = {
    "algorithms": [
        "Algorithm",
        "alternating",
        "clsprox",
        "fedadagrad",
        "fedadam",
        "fedavg",
        "fedavgm",
        "feddyn",
        "fednova",
        "fedopt",
        "fedprox",
        "fedyogi",
        "frozen_head",
        "keep_local",
        "moon",
        "on_sphere",
        "proximal",
        "scaffold",
        "server",
    ],
    "data": ["Dataset", "dataset", "load"],
    "engine": ["batched", "installed", "sequential"],
    "errors": ["DataError", "UnskewError", "UsageError"],
    "evaluate": ["Scores", "batches", "score"],
    "experiments": ["Experiment", "load_model", "run"],
    "heads": ["Calibrator", "calibrate", "ccvr", "ffc", "oracle"],
    "models": ["Split", "build", "split"],
    "optim": ["adagrad", "adam", "constant", "cosine", "momentum", "multistep", "yogi"],
    "partition": ["Federation", "classes", "dirichlet", "federate", "iid", "quantity", "shards"],
    "simulate": ["Round", "train"],
    "spheres": ["clsnorm", "spherical"],
    "statistics": ["FeatureStats", "collect"],
    "sums": ["Sum", "plain_sum"],
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'unskew' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"unskew.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
