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
        alternating as alternating,
        ce as ce,
        clsprox as clsprox,
        fedadagrad as fedadagrad,
        fedadam as fedadam,
        fedavg as fedavg,
        fedavgm as fedavgm,
        fedbabu as fedbabu,
        feddyn as feddyn,
        fednova as fednova,
        fedopt as fedopt,
        fedprox as fedprox,
        fedrep as fedrep,
        fedyogi as fedyogi,
        frozen_head as frozen_head,
        keep_local as keep_local,
        lg_fedavg as lg_fedavg,
        moon as moon,
        mse as mse,
        on_sphere as on_sphere,
        proximal as proximal,
        scaffold as scaffold,
        server as server,
    )
    from unskew.collecting import collect as collect
    from unskew.costs import Traffic as Traffic, traffic as traffic
    from unskew.cutting import split as split
    from unskew.data import Dataset as Dataset, dataset as dataset, load as load
    from unskew.discriminants import fedcof as fedcof, gnb as gnb, lda as lda, ncm as ncm
    from unskew.dispatch import train_on_lanes as train_on_lanes
    from unskew.doubts import doubts_about as doubts_about
    from unskew.engine import batched as batched, installed as installed, sequential as sequential
    from unskew.errors import DataError as DataError, UnskewError as UnskewError, UsageError as UsageError
    from unskew.estimator import CalibratedHead as CalibratedHead
    from unskew.evaluate import Scores as Scores, batches as batches, score as score
    from unskew.exchange import Algorithm as Algorithm
    from unskew.experiments import Experiment as Experiment, load_model as load_model, run as run
    from unskew.heads import (
        Calibrator as Calibrator,
        calibrate as calibrate,
        ccvr as ccvr,
        ffc as ffc,
        oracle as oracle,
    )
    from unskew.influence import influences as influences
    from unskew.methods import Method as Method, method as method
    from unskew.models import Split as Split, body as body, build as build, head as head
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
    from unskew.personal import (
        Personal as Personal,
        personal_models as personal_models,
        score_personal as score_personal,
    )
    from unskew.robust import robust_sum as robust_sum
    from unskew.simulate import Round as Round, Training as Training, train as train
    from unskew.statistics import FeatureStats as FeatureStats
    from unskew.sums import Sum as Sum, plain_sum as plain_sum
    from unskew.variants import (
        clsnorm as clsnorm,
        fixed_classifier as fixed_classifier,
        projection as projection,
        spherical as spherical,
        unit_features as unit_features,
    )
    from unskew.workers import Workers as Workers

__version__ = "0.1.0"

_HOMES = {
    "algorithms": [
        "alternating",
        "ce",
        "clsprox",
        "fedadagrad",
        "fedadam",
        "fedavg",
        "fedavgm",
        "fedbabu",
        "feddyn",
        "fednova",
        "fedopt",
        "fedprox",
        "fedrep",
        "fedyogi",
        "frozen_head",
        "keep_local",
        "lg_fedavg",
        "moon",
        "mse",
        "on_sphere",
        "proximal",
        "scaffold",
        "server",
    ],
    "collecting": ["collect"],
    "costs": ["Traffic", "traffic"],
    "cutting": ["split"],
    "data": ["Dataset", "dataset", "load"],
    "engine": ["batched", "installed", "sequential"],
    "errors": ["DataError", "UnskewError", "UsageError"],
    "evaluate": ["Scores", "batches", "score"],
    "exchange": ["Algorithm"],
    "experiments": ["Experiment", "load_model", "run"],
    "heads": ["Calibrator", "calibrate", "ccvr", "ffc", "oracle"],
    "discriminants": ["fedcof", "gnb", "lda", "ncm"],
    "dispatch": ["train_on_lanes"],
    "doubts": ["doubts_about"],
    "estimator": ["CalibratedHead"],
    "influence": ["influences"],
    "methods": ["Method", "method"],
    "models": ["Split", "body", "build", "head"],
    "optim": ["adagrad", "adam", "constant", "cosine", "momentum", "multistep", "yogi"],
    "partition": ["Federation", "classes", "dirichlet", "federate", "iid", "quantity", "shards"],
    "personal": ["Personal", "personal_models", "score_personal"],
    "robust": ["robust_sum"],
    "simulate": ["Round", "Training", "train"],
    "statistics": ["FeatureStats"],
    "sums": ["Sum", "plain_sum"],
    "variants": ["clsnorm", "fixed_classifier", "projection", "spherical", "unit_features"],
    "workers": ["Workers"],
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
