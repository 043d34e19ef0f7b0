"""Methods by their names, as the papers write them: `fednova+on_sphere`, `fedavg+clsnorm+clsprox:mu=0.1`.

A method is an algorithm and the variant of the model that it trains. Its name is made of pieces joined by "+", each
with its options: a base method first (FedAvg if there is none), then what modifies it, in any order. A piece can change
the algorithm, the model, or both; `pieces` lists them. Pieces that contradict each other are refused, with what works.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from unskew.errors import UsageError, expect, lookup
from unskew.methods import bases, modifications, presets
from unskew.methods.algorithm import Algorithm
from unskew.models.networks import Split
from unskew.models.variants import clsnorm, directions, fixed_classifier, projection, spherical, unit_features
from unskew.specs import call_user_code, converted, defaults_of, is_own, load_function, parse, pieces_of


class Method(NamedTuple):
    """A training method.

    >>> unskew.method("fednova+fedprox:mu=0.1").algorithm.numbers
    {'proximal': 0.1}
    """

    algorithm: Algorithm
    variant: Callable[[Split, torch.Generator], Split]  # the model that it trains, of the network as it was built


class Piece(NamedTuple):
    """A word in the name of a method: what it is, where it comes from, what it settles and what it makes."""

    about: str
    source: str
    settles: Mapping[str, str] = {}  # question -> answer: pieces with different answers to one question do not combine
    algorithm: Callable[..., Algorithm] | None = None  # one with a parameter `base` modifies that; else it is a base
    variant: Callable[..., Split] | None = None  # the model -> the one that is trained

    @property
    def options(self) -> dict[str, Any]:
        """The options that a spec can give, with their defaults."""
        makers = (maker for maker in (self.algorithm, self.variant) if maker)
        return {name: value for maker in makers for name, value in defaults_of(maker).items()}


def rows_of(model: Split, rows: str = "own", generator: torch.Generator | None = None) -> Split:
    """The model with its own classifier, or with a fixed one whose rows are placed by a rule of `directions`."""
    lookup("placement of rows", rows, {"own": None, **directions})
    return model if rows == "own" else fixed_classifier(model, rows, generator)


def _server(name: str) -> dict[str, str]:
    return {"the server's step": name}


def _fixed(name: str) -> dict[str, str]:
    return {"the classifier": "fixed", "the classifier's rows": f"{name}'s"}


_LEARNS = {"the classifier": "learning"}
_SPHERE = {**_fixed("on_sphere"), "the features' norm": "on_sphere's", "the loss": "on_sphere's"}

pieces: dict[str, Piece] = {  # applied in this order, however a name orders them; then those of one's own
    "fedavg": Piece("average of the clients' models", "McMahan 2017; CCVR 3.1", {}, bases.fedavg),
    "fednova": Piece("normalised averaging", "Wang 2020; SphereFed 5.1", {}, bases.fednova),
    "scaffold": Piece("control variates against drift", "Karimireddy 2020; CCVR 2", {}, bases.scaffold),
    "moon": Piece("model-contrastive features", "Li 2021; CCVR 5.1", {}, bases.moon),
    "feddyn": Piece("dynamic regularisation", "Acar 2021; CCVR 2", {}, bases.feddyn),
    "projection": Piece(
        "+ projection head of two layers, as MOON needs", "Li 2021, 3.2; CCVR Table 6", {}, None, projection
    ),
    "fedprox": Piece("+ proximal term on all tensors", "Li 2018; CCVR 5.1", {}, presets.fedprox),
    "fedavgm": Piece("+ momentum on the server", "Hsu 2019; CCVR 5.1", _server("fedavgm"), presets.fedavgm),
    "fedopt": Piece("+ SGD on the server", "Reddi 2021; SphereFed Table 16", _server("fedopt"), presets.fedopt),
    "fedadam": Piece("+ Adam on the server", "Reddi 2021", _server("fedadam"), presets.fedadam),
    "fedyogi": Piece("+ Yogi on the server", "Reddi 2021", _server("fedyogi"), presets.fedyogi),
    "fedadagrad": Piece("+ Adagrad on the server", "Reddi 2021", _server("fedadagrad"), presets.fedadagrad),
    "averaged": Piece(
        "+ exponential mean of the server's models", "Polyak and Juditsky 1992", {}, modifications.averaged
    ),
    "clsprox": Piece("+ proximal term on the classifier", "CCVR 3.3", _LEARNS, presets.clsprox),
    "clsnorm": Piece("+ normalised classifier weights", "CCVR 3.3", _LEARNS, None, clsnorm),
    "on_sphere": Piece(
        "+ SphereFed: unit features, fixed classifier, mse", "SphereFed 4, D", _SPHERE, modifications.on_sphere,
        spherical,
    ),
    "frozen_head": Piece(
        "+ fixed classifier", "SphereFed Table 3: Fix; Table 2: BABU", _fixed("frozen_head"), modifications.frozen_head,
        rows_of,
    ),
    "unit_features": Piece(
        "+ features of unit norm", "SphereFed Table 3: Norm", {"the features' norm": "unit_features's"}, None,
        unit_features,
    ),
    "mse": Piece(
        "+ squared error instead of cross entropy", "SphereFed 4.2, Table 3", {"the loss": "mse"}, modifications.mse
    ),
    "ce": Piece("+ cross entropy with a temperature", "SphereFed 4.2, Table 3", {"the loss": "ce"}, modifications.ce),
    "fedbabu": Piece(
        "+ fixed classifier, tuned for personal models", "Oh 2022; SphereFed B", _fixed("fedbabu"), presets.fedbabu
    ),
    "lg_fedavg": Piece(
        "+ features stay at home", "Liang 2020; SphereFed B", {**_LEARNS, "what stays at home": "features"},
        presets.lg_fedavg,
    ),
    "fedrep": Piece(
        "+ classifier stays at home, learns first", "Collins 2021; SphereFed B",
        {**_LEARNS, "what stays at home": "classifier"}, presets.fedrep,
    ),
}  # fmt: skip


def method(spec: str) -> Method:
    """The method of a spec.

    >>> sphere = method("fednova+on_sphere:rows=simplex")
    >>> sphere.algorithm.frozen("classifier.weight")
    True
    """
    expect("spec", spec, str, 'write a method\'s name, such as "fednova+on_sphere"')
    chosen = [_chosen(part) for part in pieces_of(spec)]
    _check(spec, chosen)
    algorithm, variants = bases.fedavg(), []
    for _, name, piece, options in sorted(chosen, key=_place):
        if piece.algorithm:
            around = {"base": algorithm} if _modifies(piece) else {}
            algorithm = call_user_code("method", name, piece.algorithm, **_for(piece.algorithm, options), **around)
            if not isinstance(algorithm, Algorithm):
                raise UsageError(f"method is {name!r}: it returned {type(algorithm).__name__}, not an Algorithm")
        if piece.variant:
            variants.append(functools.partial(piece.variant, **_for(piece.variant, options)))

    def variant(model: Split, generator: torch.Generator) -> Split:
        for change in variants:
            drawn = "generator" in inspect.signature(change).parameters
            model = change(model, generator=generator) if drawn else change(model)
        return model

    return Method(algorithm, variant)


def skeleton(spec: str, model: Split) -> Split:
    """The variant of a model that a method trains, with any values: what stored weights are loaded into."""
    named = [part for part in pieces_of(spec) if not is_own(part)]  # no code is run
    for _, _, piece, given in sorted((_chosen(part) for part in named), key=_place):
        if piece.variant:
            options = {**piece.options, **given}
            if options.get("rows", "own") != "own":
                options["rows"] = "he"  # which costs nothing
            model = piece.variant(model, **_for(piece.variant, options))
    return model


class _Chosen(NamedTuple):
    spec: str
    name: str
    piece: Piece
    options: dict[str, Any]


def _place(chosen: _Chosen) -> tuple[bool, int]:
    """A base comes before what modifies it; for the rest, see `pieces`."""
    order = list(pieces)
    return _modifies(chosen.piece), order.index(chosen.name) if chosen.name in order else len(order)


def _chosen(spec: str) -> _Chosen:
    """One piece of a method's spec."""
    if not spec:
        raise UsageError("method has an empty piece: write names joined by single +, such as fednova+on_sphere")
    file, colon, function = spec.partition(":")
    if colon and "=" not in function and file not in pieces and not is_own(spec):
        raise UsageError(f"method is {spec!r}: write name:option=value, or file.py:function for one of your own")
    name, options = parse(spec)
    if name.endswith(".py"):
        raise UsageError(f"method is {spec!r}: name the function in that file too, as in {name}:function")
    if ":" in name:
        maker = load_function("method", name)
        parameters = inspect.signature(maker).parameters.items()
        needed = [key for key, value in parameters if value.default is value.empty and key != "base"]
        if needed:
            raise UsageError(f"method is {name!r}: give its {', '.join(needed)} defaults, so that they are options")
        piece = Piece(name, name, algorithm=maker)
    else:
        piece = lookup("method", name, pieces)
    if not _modifies(piece):
        piece = piece._replace(settles={"the base method": name})
    return _Chosen(spec, name, piece, converted(spec, options, piece.options))


def files_of(spec: str) -> list[str]:
    """The files of one's own that a spec names."""
    return [part.partition(".py:")[0] + ".py" for part in pieces_of(spec) if ".py:" in part]


def _modifies(piece: Piece) -> bool:
    """Whether a piece changes a method; else it is one."""
    return piece.algorithm is None or "base" in inspect.signature(piece.algorithm).parameters


def _for(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in defaults_of(function)}


def _taken_apart(chosen: list[_Chosen]) -> str:
    """What remains of a method with on_sphere when that is taken apart and the rest has its way."""
    rest = [part for part in chosen if part.name != "on_sphere"]
    settled = {question for part in rest for question in part.piece.settles}
    sphere = {"unit_features": "unit_features", "frozen_head": "frozen_head:rows=qr", "mse": "mse"}
    left = [spec for name, spec in sphere.items() if not settled & pieces[name].settles.keys()]
    if len(rest) == len(chosen) or len(left) == len(sphere):
        return ""
    return f", or take on_sphere apart: {'+'.join([*(part.spec for part in rest), *left])}"


def _check(spec: str, chosen: list[_Chosen]) -> None:
    """Refuse pieces that do not combine, and say what would work instead."""
    specs = [part.spec for part in chosen]
    for (a, one), (b, other) in itertools.combinations(enumerate(chosen), 2):
        working = " or ".join(dict.fromkeys("+".join([*specs[:out], *specs[out + 1 :]]) for out in (b, a)))
        if one.name == other.name:
            raise UsageError(f"method is {spec!r}, which names {one.name} twice: try {working}")
        for question, answer in one.piece.settles.items():
            differs = other.piece.settles.get(question, answer)
            if differs != answer:
                raise UsageError(
                    f"method is {spec!r}, but {one.name} and {other.name} do not combine: both settle {question} "
                    f"({answer}, {differs}); try {working}{_taken_apart(chosen)}"
                )
