"""The file of a model, and the one way to open a model: what `unskew run` and `unskew calibrate` write is of one kind.

It is a sealed safetensors file of weights under the names of a module, so that plain torch loads them. Beside them
stands what else it takes to use them (`About`): what makes the module, what the classes are called, how inputs are
prepared. So the folder of a run, or such a file, is a model by itself; `open_model` builds in what a plain module lacks
(the variant that a method trains, a transform before the classifier, another number of classes).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unskew.calibration.calibrator import behind, plain
from unskew.conversation.agreement import Known
from unskew.data.preparation import PIXELS, Preparation, as_module
from unskew.errors import DataError, UnskewError, UsageError, retold
from unskew.files import limits
from unskew.files.untrusted import parse_json, reading
from unskew.files.writing import metadata_of, read, save_sealed
from unskew.methods.names import skeleton
from unskew.models.cutting import rejoined, split
from unskew.models.endings import is_linear
from unskew.models.features import ended
from unskew.models.foreign import brings_weights, libraries, load_module
from unskew.models.inputs import check_size, parsed, stand_in
from unskew.models.networks import Split, check_memory, linear, linear_of, networks
from unskew.models.transforms import Transform, front_of
from unskew.models.variants import NormalisedLinear
from unskew.models.weights import is_safetensors, put_weights, read_weights, renamed
from unskew.seeds import seeded
from unskew.specs import is_own, without_folders
from unskew.statistics.origin import Origin
from unskew.tree import Tree

DAMAGED = "what it says of itself is damaged"


# ---------------------------------------------------------------------------------------------- what a file says


@dataclass(frozen=True)
class About:
    """What stands beside the weights."""

    spec: str | None  # what makes the module: see `foreign.load_module`
    method: str | None  # of a run: the module is what `spec` makes, cut, in the variant that this method trains
    layer: str  # the classification layer, by its name in the module; of several, joined by "+"
    classes: int
    transform: str  # before that layer
    normalised: bool  # whether the layer's weight vectors count by direction alone
    calibrator: str | None  # which has made the layer
    labels: tuple[str, ...] | None
    preparation: str | None
    inputs: str | None

    def __post_init__(self) -> None:
        for name in ("spec", "method", "calibrator", "preparation", "inputs"):
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(f"{name} is no text")
        if type(self.layer) is not str or type(self.normalised) is not bool:
            raise ValueError("layer or normalised is missing")
        if type(self.classes) is not int or self.classes < 1:
            raise ValueError("classes must be a whole number above 0")
        object.__setattr__(self, "transform", Transform(self.transform).name)
        if isinstance(self.labels, list):  # as JSON has them
            object.__setattr__(self, "labels", tuple(self.labels))


def about_of(path: Path) -> About | None:
    """What a model's file says of itself; None, for weights from elsewhere."""
    metadata = metadata_of(path) if is_safetensors(path) else {}
    text = metadata.get("model")
    if text is None:
        return None
    if "seal" not in metadata:
        raise DataError(f"{path}: {DAMAGED}: it has no seal; get it again")
    with reading(path, DAMAGED):
        about = About(**parse_json(text, f"{path}: {DAMAGED}"))
        known_from_json(path, asdict(about))
        limits.check("classes", about.classes, path)
        return about


def known_of_model(path: Path, classes: int | None = None) -> Known:
    """What a model's file says of its data, for a head of so many classes if they are given; other weights say
    nothing.
    """
    about = about_of(path)
    if about is None:
        return Known(str(path))
    known = known_from_json(path, asdict(about))
    return known if classes in (None, about.classes) else known._replace(labels=None)  # a new head has other classes


def origin_to_json(origin: Origin) -> dict[str, Any]:
    """What files around a model carry of the data that it was made from."""
    return {"labels": origin.labels, "preparation": origin.preparation, "inputs": origin.inputs}


def known_from_json(path: Path, told: Mapping[str, Any]) -> Known:
    """What `origin_to_json` wrote; a ValueError or a KeyError where it is damaged."""
    labels, preparation, inputs = told["labels"], told["preparation"], told["inputs"]
    if labels is not None and not (isinstance(labels, list | tuple) and all(isinstance(name, str) for name in labels)):
        raise ValueError("labels is no list of names")
    if labels is not None and len(set(labels)) < len(labels):
        raise ValueError("labels names a class twice")
    if inputs is not None and not parsed(str(inputs)):
        raise ValueError(f"inputs is {inputs!r}")
    names = None if labels is None else tuple(labels)
    return Known(str(path), names, None if preparation is None else Preparation.parse(str(preparation)), inputs)


# ---------------------------------------------------------------------------------------------- opening


class Opened(NamedTuple):
    """A model as it was asked for: the module itself, and the same cut before its classifier."""

    module: nn.Module
    model: Split
    fresh: bool = False  # whether its classifier is a new one, which knows nothing
    spec: str | None = None  # what makes the module, and the method whose variant it is: see `About`
    method: str | None = None


def load_model(path: str | Path, trust: bool = False) -> Split:
    """The model of a run's folder, or of a file that `unskew run` or `unskew calibrate` has written, in eval mode.

    It takes inputs that are prepared as its file says: pixel values / 255, less the mean, over the standard deviation
    of the training images, as `batches` gives them. A file can name code that makes its network, file.py:function; that
    is run only where whoever wrote the file is trusted.

    >>> import tempfile
    >>> short = unskew.Experiment(clients=3, rounds=1, steps=1, calibrate="ffc", engine="sequential")
    >>> with tempfile.TemporaryDirectory() as out:
    ...     records = list(unskew.run(short, Path(out, "run")))
    ...     print(unskew.load_model(Path(out, "run", "calibrated-ffc.safetensors")).classifier)
    Linear(in_features=64, out_features=10, bias=True)
    """
    file = file_of_run(Path(path)) if Path(path).is_dir() else Path(path)
    about = about_of(file)
    if about is None or about.spec is None:
        raise DataError(
            f"{path}: not a model of Unskew's, which would say how it is built; the folder of a run is one, and so are "
            "model.safetensors and calibrated-*.safetensors in it"
        )
    _check_trusted(file, about.spec, trust)
    with reading(file, DAMAGED):
        return open_model(_beside(about.spec, file), file, trust=trust).model.eval()


def located(spec: str, weights: Path | None = None, trust: bool = False) -> tuple[str, Path | None]:
    """The spec and the weights of a model, where `spec` may be the folder of a run or a model's file: it says both."""
    place = Path(spec)
    if place.is_dir() and (place / "experiment.json").is_file():
        file = file_of_run(place)
    elif place.suffix == ".safetensors" and place.is_file():
        file = place
    else:
        return spec, weights
    about = about_of(file)
    if about is None or about.spec is None:
        return spec, weights  # weights from elsewhere: `load_module` says how to give them
    if weights is not None:
        raise UsageError(f"--model {spec} has weights of its own: leave --weights {weights} out, or give its --model")
    _check_trusted(file, about.spec, trust)
    return _beside(about.spec, file), file


def file_of_run(folder: Path) -> Path:
    """The trained model in the folder of a run."""
    file, own = folder / "model.safetensors", sorted(folder.glob("client-*.safetensors"))
    if file.is_file():
        return file
    if own:
        raise UsageError(f"{folder}: its method keeps a model for each client: give one of them, such as {own[0]}")
    if (folder / "experiment.json").is_file():
        history = folder / "records.jsonl"
        if history.is_file() and [record["kind"] for record in read(history)[-1:]] == ["end"]:
            raise UsageError(
                f"{file} is gone, though its run is finished: put a copy of it back, or run the experiment again in "
                "another folder"
            )
        raise UsageError(f"{folder}: its run is not finished: go on with unskew run --resume --out {folder}")
    raise UsageError(f"{folder} holds no run: give the folder of one, or a model's file")


def is_code(model: str) -> bool:
    """Whether the spec of a model names code that is neither Unskew's nor that of a library that it knows."""
    return model.endswith(".pt2") or is_own(model)


def _check_trusted(file: Path, spec: str, trust: bool) -> None:
    if is_code(spec) and not trust:
        raise UsageError(
            f"{file} names code that would run here: {spec.strip()}. Read it; if you trust whoever wrote that, add "
            "--trust (trust=True)"
        )


def _beside(spec: str, file: Path) -> str:
    """A spec of code, which was asked for trust, whose file lies beside the model's, where it does. Any other stays as
    it is: with the name of a folder before it, it could name code after all.
    """
    code = file.parent / f"{spec.partition('.py:')[0]}.py"
    own = is_own(spec) and ".py:" in spec and code.is_file()
    return f"{code}:{spec.partition('.py:')[2]}" if own else spec


def open_model(
    spec: str,
    weights: Path | None = None,
    *,
    classes: int | None = None,
    layer: str | None = None,
    trust: bool = False,
    example: Any = None,
    check: Callable[[nn.Module], None] = lambda module: None,
) -> Opened:
    """A model, cut where `example` or `layer` says: of a spec (see `foreign.load_module`) and its weights, or of the
    folder of a run or a model's file, which has both.

    Its number of classes is that of the weights. `classes` gives it a new head for another number, of zeros. `check`
    is shown the module before anything is run on it, and may refuse it.
    """
    spec, weights = located(spec, weights, trust)
    tree = read_weights(weights) if weights else {}
    about = about_of(weights) if weights else None
    inside, transform = None, "identity"
    starts: tuple[str, ...] = ("",)
    if about is not None:
        inside, transform = about.classes, about.transform
        starts = tuple(f"{name}." if name else "" for name in about.layer.split("+"))
        own = [value for name, value in tree.items() if name.startswith(starts)]  # of another name where others make it
        whole = transform == "identity" or f"{starts[0]}weight" in tree
        if not (whole and any(value.ndim and len(value) == inside for value in own)):
            raise DataError(f"{weights}: its classification layer {about.layer!r} is not among its weights")
    source = spec.partition(":")[0]
    if inside is None and source in networks and "classifier.weight" in tree:
        inside = len(tree["classifier.weight"])
        limits.check("classes", inside, weights)
    if classes is not None:
        limits.check("classes", classes, f"model {spec!r}")
    with retold(UnskewError, lambda text: _named(text, spec, about, weights)):
        module = _module(spec, inside or classes, trust, tree, about, weights)  # other classes: mended below
    tree = renamed(module, tree, weights) if weights else {}
    if about is not None and layer is None and not isinstance(module, Split):
        layer = about.layer if len(starts) == 1 or example is None else None
    held: Tree = {}
    if transform != "identity":  # its classifier does not fit the features as they are
        held = {name: tree.pop(starts[0] + name) for name in ("weight", "bias") if starts[0] + name in tree}
        initial = module.state_dict()
        tree |= {starts[0] + name: initial[starts[0] + name] for name in ("weight", "bias")
                 if starts[0] + name in initial}  # fmt: skip
    if weights:
        _resize(module, tree)
        put_weights(module, tree, weights)
    check(module)
    model = split(module, example, layer)
    if held:
        _check_head(held, transform, plain(model.classifier).in_features, inside, weights)
        head = linear_of(held["weight"].flatten(1), held.get("bias"))
        model.classifier = behind(head, transform, plain(model.classifier).in_features)
    if about is not None and about.normalised and not isinstance(linear(model.classifier), NormalisedLinear):
        raise DataError(f"{weights}: {DAMAGED}: normalised is true, but its network has no normalised classifier; get "
                        "it again")  # fmt: skip
    # A file of yours may load its own weights.
    untrained = weights is None and source in (*networks, *libraries) and not brings_weights(spec)
    fresh = classes is not None and (untrained or classes != model.classes or not linear(model.classifier).weight.any())
    if classes is not None and classes != model.classes:
        old = plain(model.classifier)
        new = classes * model.dimension * old.weight.itemsize
        limits.check("unbacked", new, f"model {spec!r}: a head of {classes:,} classes")
        bias = None if old.bias is None else old.weight.new_zeros(classes)
        model.classifier = linear_of(old.weight.new_zeros(classes, model.dimension), bias)
    return Opened(module, model, fresh, spec, None if about is None else about.method)


def _named(text: str, spec: str, about: About | None, weights: Path | None) -> str:
    """What is refused of a spec, after the file where that was read, if it was in one."""
    told = about is not None and about.spec is not None and weights is not None and _beside(about.spec, weights) == spec
    return f"{weights}: {text}" if told and str(weights) not in text else text


def _check_head(held: Tree, transform: str, features: int, classes: int | None, weights: Path | None) -> None:
    """Refuse a head that does not fit the transform that its file names, before the transform is made."""
    weight, bias = held["weight"].flatten(1), held.get("bias")
    expected = (classes, Transform(transform).width(features))
    if weight.shape != expected or (bias is not None and bias.shape != expected[:1]):
        shapes = " and ".join(str(tuple(value.shape)) for value in (weight, bias) if value is not None)
        raise DataError(
            f"{weights}: {DAMAGED}: its classification layer has the shape {shapes}; behind the transform "
            f"{transform!r} of {features} features it must be {expected}: get it again"
        )


def _module(
    spec: str, classes: int | None, trust: bool, tree: Tree, about: About | None, weights: Path | None
) -> nn.Module:
    """The module of a spec, with initial weights; for those of a run, cut and in the variant that its method trains."""
    backed = sum(value.numel() * value.itemsize for value in tree.values())
    if about is None or about.method is None:
        return load_module(spec, classes, trust, backed)
    method, inputs = about.method, about.inputs

    def make() -> Split:
        module = load_module(spec, classes, trust, backed)
        if not isinstance(module, Split):
            if inputs is None:
                raise DataError(f"{weights}: {DAMAGED}: it lacks the inputs by which its network is cut")
            check_size(inputs, weights)
            module = split(module, stand_in(inputs))
        with reading(weights, f"{DAMAGED}: method"):
            varied = skeleton(method, module)
        if not about.normalised and isinstance(linear(varied.classifier), NormalisedLinear):
            varied.classifier = plain(varied.classifier)
        return varied

    if spec.partition(":")[0] in networks:
        check_memory(make, weights, backed)
    with seeded(0):  # all that is drawn is replaced
        return make()


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


# ---------------------------------------------------------------------------------------------- writing


def save_model(path: Path, model: Split, source: Opened, origin: Origin, calibrator: str | None = None) -> Tree:
    """Write a model's weights under the names of the module it was cut from, with what it takes to use them; returns
    the weights as they were written. `source` is what it was made from.
    """
    layer = model.layer
    if isinstance(source.module, Split):
        end = linear(source.module.classifier)
        layer = next(name for name, part in source.module.named_modules() if part is end)
    spec = source.spec if source.method is not None or source.spec is None else without_folders(source.spec)
    about = About(spec, source.method, layer, linear(model.classifier).out_features, front_of(model.classifier),
                  isinstance(linear(model.classifier), NormalisedLinear), calibrator,
                  **origin_to_json(origin))  # fmt: skip
    tree = rejoined(model, source.module)
    save_sealed(path, tree, {"model": json.dumps(asdict(about))})
    return tree


def write_model(path: Path, model: Split, source: Opened, calibrator: str, origin: Origin) -> str:
    """Write a calibrated model (see `save_model`); says how others load it."""
    tree, module, front = save_model(path, model, source, origin, calibrator), source.module, front_of(model.classifier)
    own = module.state_dict()
    if front != "identity":
        return f"its classifier stands behind the transform {front}: plain torch needs --export"
    if any(name not in own or own[name].shape != value.shape for name, value in tree.items()):
        shape = tuple(linear(model.classifier).weight.shape)
        return f"{model.layer} has the shape {shape} now: build the model so before loading it in plain torch"
    try:
        copy.deepcopy(module).load_state_dict(dict(tree))
    except Exception:  # as of torchvision's MNASNet, which asks for a version that safetensors can't hold
        return "load it by unskew.models.weights.load_weights(model, path): its parts ask for more than tensors"
    return "it loads in plain torch: model.load_state_dict(safetensors.torch.load_file(path))"


# ---------------------------------------------------------------------------------------------- programs


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
