"""Files around calibration: a model with its weights, candidate heads, the calibrated model.

A calibrated model is a safetensors file of weights under the model's own names, so that plain torch loads it; what was
done stands in its metadata, and `opened` builds in what a plain model lacks (a transform before the classifier, another
number of classes). Candidate heads go to the sites in one sealed file, signed if the server has a key; `answers` has
what they answer.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unskew.calibration.heads import behind, plain
from unskew.conversation.agreement import Known
from unskew.data.preparation import PIXELS, Preparation, as_module
from unskew.errors import DataError, UsageError
from unskew.files import limits
from unskew.files.signing import Key, Signed, is_name, is_nonce, is_signature, signature_of
from unskew.files.untrusted import Source, parse_json, reading
from unskew.files.writing import digest, load_sealed, metadata_of, save_sealed, seal, tree_bytes
from unskew.models.cutting import rejoined, split
from unskew.models.endings import is_linear
from unskew.models.features import ended
from unskew.models.foreign import brings_weights, libraries, load_module
from unskew.models.inputs import parsed, stand_in
from unskew.models.networks import Split, linear, linear_of, networks
from unskew.models.transforms import Transform, front_of
from unskew.models.weights import is_safetensors, put_weights, read_weights, renamed
from unskew.statistics.collecting import weights_digest
from unskew.statistics.fingerprints import Part
from unskew.statistics.moments import FeatureStats
from unskew.statistics.origin import Origin
from unskew.tree import Tree

OLD = "old"  # the name of the head that the model has
MOST_HEADS = 16
PROPOSE = "`unskew calibrate --propose` writes them"


# ---------------------------------------------------------------------------------------------- models


class Opened(NamedTuple):
    """A model as it was asked for: the module itself, and the same cut before its classifier."""

    module: nn.Module
    model: Split
    fresh: bool = False  # whether its classifier is a new one, which knows nothing


def opened(
    spec: str,
    weights: Path | None,
    *,
    classes: int | None = None,
    layer: str | None = None,
    trust: bool = False,
    example: Any = None,
    check: Callable[[nn.Module], None] = lambda module: None,
) -> Opened:
    """The model of a spec (see `foreign.load_module`) with its weights, cut where `example` or `layer` says.

    Its number of classes is that of the weights. `classes` gives it a new head for another number, of zeros. `check`
    is shown the module before anything is run on it, and may refuse it.
    """
    tree = read_weights(weights) if weights else {}
    about = _about(weights) if weights else {}
    transform, inside = about.get("transform", "identity"), about.get("classes")
    starts = tuple(f"{name}." if name else "" for name in about.get("layer", "").split("+"))
    start = starts[0]
    own = [value for name, value in tree.items() if name.startswith(starts)]  # of another name where others make it
    whole = transform == "identity" or f"{start}weight" in tree
    if about and not (whole and any(value.ndim and len(value) == inside for value in own)):
        raise DataError(f"{weights}: its calibrated layer {about['layer']!r} is not among its weights")
    source = spec.partition(":")[0]
    if inside is None and source in networks and "classifier.weight" in tree:
        inside = len(tree["classifier.weight"])
        limits.check("classes", inside, weights)
    if classes is not None:
        limits.check("classes", classes, f"model {spec!r}")
    backed = sum(value.numel() * value.itemsize for value in tree.values())
    module = load_module(spec, inside or classes, trust, backed)  # other classes than the weights have: mended below
    tree = renamed(module, tree, weights) if weights else {}
    layer = about["layer"] if layer is None and about and (len(starts) == 1 or example is None) else layer
    held: Tree = {}
    if transform != "identity":  # its classifier does not fit the features as they are
        held = {name: tree.pop(start + name) for name in ("weight", "bias") if start + name in tree}
        initial = module.state_dict()
        tree |= {start + name: initial[start + name] for name in ("weight", "bias") if start + name in initial}
    if weights:
        _resize(module, tree)
        put_weights(module, tree, weights)
    check(module)
    model = split(module, example, layer)
    if held:
        head = linear_of(held["weight"].flatten(1), held.get("bias"))
        model.classifier = behind(head, transform, plain(model.classifier).in_features)
    # A file of yours may load its own weights.
    untrained = weights is None and source in (*networks, *libraries) and not brings_weights(spec)
    fresh = classes is not None and (untrained or classes != model.classes or not linear(model.classifier).weight.any())
    if classes is not None and classes != model.classes:
        old = plain(model.classifier)
        new = classes * model.dimension * old.weight.itemsize
        limits.check("unbacked", new, f"model {spec!r}: a head of {classes:,} classes")
        bias = None if old.bias is None else old.weight.new_zeros(classes)
        model.classifier = linear_of(old.weight.new_zeros(classes, model.dimension), bias)
    return Opened(module, model, fresh)


def _about(path: Path) -> dict[str, Any]:
    """What stands in the metadata of a calibrated model; nothing, for other weights."""
    metadata = metadata_of(path) if is_safetensors(path) else {}
    text, damaged = metadata.get("calibrated"), "what it says of its calibration is damaged"
    if text and "seal" not in metadata:
        raise DataError(f"{path}: {damaged}: it has no seal; get it again")
    with reading(path, damaged):
        about = parse_json(text, f"{path}: {damaged}") if text else {}
        if not about:
            return {}
        limits.check("classes", int(about["classes"]), path)
        return {
            "layer": str(about["layer"]),
            "classes": int(about["classes"]),
            "transform": Transform(about["transform"]).name,
            "known": _known(path, about),
        }


def known_of_model(path: Path, classes: int | None = None) -> Known:
    """What a calibrated model says of its data, for a head of so many classes if they are given; other weights say
    nothing.
    """
    about = _about(path)
    if not about:
        return Known(str(path))
    same = classes in (None, about["classes"])  # a new head has other classes
    return about["known"] if same else about["known"]._replace(labels=None)


def _told(origin: Origin) -> dict[str, Any]:
    """What files around a calibration carry of the data that their statistics came from."""
    return {"labels": origin.labels, "preparation": origin.preparation, "inputs": origin.inputs}


def _known(path: Path, told: Mapping[str, Any]) -> Known:
    """What `_told` wrote; a ValueError or a KeyError where it is damaged."""
    labels, preparation, inputs = told["labels"], told["preparation"], told["inputs"]
    if labels is not None and not (isinstance(labels, list) and all(isinstance(name, str) for name in labels)):
        raise ValueError("labels is no list of names")
    if labels is not None and len(set(labels)) < len(labels):
        raise ValueError("labels names a class twice")
    if inputs is not None and not parsed(str(inputs)):
        raise ValueError(f"inputs is {inputs!r}")
    names = None if labels is None else tuple(labels)
    return Known(str(path), names, None if preparation is None else Preparation.parse(str(preparation)), inputs)


def _resize(module: nn.Module, tree: Mapping[str, Tensor]) -> None:
    """Give the module's classification layers as many classes as the weights have, if that is all that differs."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    parts = {name: part for name, part in module.named_modules() if type(part) in kinds and is_linear(part)}
    other = [name for name, part in parts.items() if tree.get(f"{name}.weight", part.weight).shape != part.weight.shape]
    new = {tree[f"{name}.weight"].shape[:1] for name in other}
    if len(new) != 1 or any(tree[f"{name}.weight"].shape[1:] != parts[name].weight.shape[1:] for name in other):
        return
    (rows,) = new.pop()
    for name in other:
        parent, _, last = name.rpartition(".")
        resized: Any = copy.deepcopy(parts[name])
        setattr(resized, "out_features" if isinstance(resized, nn.Linear) else "out_channels", rows)
        resized.weight = nn.Parameter(resized.weight.new_zeros(rows, *resized.weight.shape[1:]))
        resized.bias = None if resized.bias is None else nn.Parameter(resized.bias.new_zeros(rows))
        setattr(module.get_submodule(parent), last, resized)


def write_model(path: Path, model: Split, module: nn.Module, name: str, stats: FeatureStats) -> str:
    """Write a calibrated model's weights under the names of the module it was cut from; says how to load them."""
    front = front_of(model.classifier)
    layer = "classifier" if isinstance(module, Split) else model.layer
    about = {"layer": layer, "classes": linear(model.classifier).out_features, "transform": front, "calibrator": name,
             "examples": int(stats.count.sum()), **_told(stats.origin)}  # fmt: skip
    tree = rejoined(model, module)
    save_sealed(path, tree, {"calibrated": json.dumps(about)})
    own = module.state_dict()
    if front != "identity":
        return f"its classifier stands behind the transform {front}: plain torch needs --export"
    if any(name not in own or own[name].shape != value.shape for name, value in tree.items()):
        shape = tuple(linear(model.classifier).weight.shape)
        return f"{layer} has the shape {shape} now: build the model so before loading it in plain torch"
    try:
        copy.deepcopy(module).load_state_dict(dict(tree))
    except Exception:  # as of torchvision's MNASNet, which asks for a version that safetensors can't hold
        return "load it by unskew.models.weights.load_weights(model, path): its parts ask for more than tensors"
    return "it loads in plain torch: model.load_state_dict(safetensors.torch.load_file(path))"


class Program(NamedTuple):
    """A model that can be exported by `programs.exported`."""

    module: nn.Module
    example: Any
    takes: str  # what it takes, in words


def program_of(model: Split, origin: Origin, prepared: bool = False) -> Program:
    """A calibrated model as it is to be exported.

    If it is to be `prepared`, the part of the preparation that works on tensors goes in front: then the program takes
    pixels 0..255, or other values as the data have them, in the sizes that the model takes.
    """
    if origin.inputs is None:
        raise UsageError(
            "--export needs to know what the model takes, and the sites' batches were not tensors of one kind with a "
            "row for each example: export it in Python, with programs.exported(model, example, path)"
        )
    if not prepared:
        said = "" if origin.preparation is None else f", prepared as in the statistics ({origin.preparation})"
        return Program(model, stand_in(origin.inputs), f"it takes {origin.inputs}{said}, and gives {_given_by(model)}")
    parts = parsed(origin.inputs)
    if origin.preparation is None or len(parts) != 1 or parts[0].name:
        raise UsageError(
            f"--export-preparation needs statistics of images or vectors that Unskew has read itself; these are of "
            f"{origin.inputs}, which a loader has prepared: export without it"
        )
    preparation = Preparation.parse(origin.preparation)
    pixels = preparation.numbers == PIXELS
    module = nn.Sequential(as_module(preparation), InType(parts[0].dtype), ended(model))
    example = stand_in(origin.inputs).to(torch.uint8 if pixels else torch.float32)
    sizes = ",".join(map(str, parts[0].sizes))
    scaled = any((preparation.image_size, preparation.resize, preparation.crop))
    cut = ", scaled and cut out already" if scaled else ""
    return Program(
        module, example, f"it takes {'uint8' if pixels else 'float32'}[{sizes}]{cut}, and gives {_given_by(model)}"
    )


def _given_by(model: Split) -> str:
    """What a program gives, in words."""
    end = getattr(model.features, "ending", None)
    return f"{end.end if end is not None and end.end else 'logits'} of {model.classes} classes, one tensor"


class InType(nn.Module):
    """Numbers in the type that a model takes."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.dtype: torch.dtype = getattr(torch, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The same numbers."""
        return x.to(self.dtype)


# ---------------------------------------------------------------------------------------------- candidates


def heads_bytes(
    model: Split, made: Mapping[str, nn.Module], stats: FeatureStats, fresh: bool = False, key: Key | None = None,
    hold_out: float | None = None,
) -> bytes:  # fmt: skip
    """The file of candidate heads that were made from some statistics, after the head that the model has, unless that
    is `fresh` and knows nothing; signed if there is a key. `hold_out` is the share of examples to score them on.
    """
    tree: Tree = {}
    fronts = {}
    for name, head in {**({} if fresh else {OLD: model.classifier}), **made}.items():
        layer = plain(head)
        tree[f"{name}/weight"] = layer.weight
        if layer.bias is not None:
            tree[f"{name}/bias"] = layer.bias
        fronts[name] = front_of(head)
    about = {
        "heads": json.dumps(fronts), "weights": weights_digest(model),
        "statistics": digest(sorted(part.digest for part in stats.parts)), "data": json.dumps(_told(stats.origin)),
        "nonce": json.dumps(stats.origin.nonce), "site": json.dumps(None if key is None else key.name),
        "hold_out": json.dumps(hold_out),
    }  # fmt: skip
    if key is not None:
        about["signature"] = signature_of(key, "heads", stats.origin.nonce, seal(tree, about))
    return tree_bytes(tree, {**about, "seal": seal(tree, about)})


def known_of_heads(path: Path) -> Known:
    """What a file of candidate heads says of the data that they were made from."""
    with reading(path, f"holds no heads, or damaged ones; {PROPOSE}"):
        return _known(path, parse_json(metadata_of(path)["data"], f"{path}: what it says of its data"))


class Heads(NamedTuple):
    """Candidate heads, the old one first if there is one, and who they are from."""

    modules: dict[str, nn.Module]
    signed: Signed  # its digest is what answers name
    hold_out: float | None = None  # the share of a site's examples to score them on; None: the site knows

    @property
    def digest(self) -> str:
        """What answers name these heads by."""
        return self.signed.digest


def read_heads(path: Source, model: Split, parts: Iterable[Part] | None = None) -> Heads:
    """The candidate heads of a file; refused if they are not for this model, or were not made from the statistics of
    these `parts`.
    """
    tree, metadata = load_sealed(path)
    if not {"heads", "weights", "statistics", "data", "nonce", "site", "hold_out"} <= set(metadata):
        raise DataError(f"{path}: holds no heads; {PROPOSE}")
    signature = metadata.pop("signature", None)
    nonce, site, hold_out = (parse_json(metadata[name], path) for name in ("nonce", "site", "hold_out"))
    signed = Signed("heads", site, nonce, seal(tree, metadata), signature)
    fits = (nonce is None or is_nonce(nonce)) and (site is None or is_name(site))
    if not fits or (site is None) != (signature is None) or (site is not None and not is_signature(signature)):
        raise DataError(f"{path}: what it says of who made it is damaged; {PROPOSE}")
    if hold_out is not None and not (type(hold_out) in (int, float) and 0 <= hold_out < 1):
        raise DataError(f"{path}: hold_out is {str(hold_out)[:20]}; it must be at least 0 and below 1; {PROPOSE}")
    if metadata["weights"] != weights_digest(model):
        raise DataError(f"{path}: heads for a model with other weights: give the weights that the statistics were "
                        "collected with")  # fmt: skip
    if parts is not None and metadata["statistics"] != digest(sorted(part.digest for part in parts)):
        raise DataError(f"{path}: heads made from other statistics: give the --stats and --without of --propose")
    with reading(path, "its heads don't fit the model"):
        fronts = parse_json(metadata["heads"], f"{path}: the list of its heads")
        if not isinstance(fronts, dict) or not fronts:
            raise DataError(f"{path}: holds no heads; {PROPOSE}")
        if len(fronts) > MOST_HEADS:  # each answer tells something of the site's examples
            raise DataError(f"{path}: holds {len(fronts)} heads; at most {MOST_HEADS} are scored")
        limits.check("unbacked", sum(Transform(front).nbytes(model.dimension) for front in fronts.values()), path)
        return Heads({name: _head(name, front, tree, model) for name, front in fronts.items()}, signed, hold_out)


def _head(name: str, front: str, tree: Tree, model: Split) -> nn.Module:
    """A candidate head of a file behind its transform; refused before it is made where it does not fit the model."""
    weight, bias = tree[f"{name}/weight"], tree.get(f"{name}/bias")
    expected = (model.classes, Transform(front).width(model.dimension))
    biased = bias is None or bias.shape == expected[:1]
    if weight.shape != expected or not biased or not weight.is_floating_point():
        raise DataError(f"its heads don't fit the model: {name!r} is {weight.dtype} of shape {tuple(weight.shape)}; it "
                        f"must be floating point of shape {expected}")  # fmt: skip
    if not all(torch.isfinite(value).all() for value in (weight, bias) if value is not None):
        raise DataError(f"{name!r} holds NaN or infinity")
    return behind(linear_of(weight, bias), front, model.dimension)
