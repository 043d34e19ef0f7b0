"""Models made elsewhere: the module that a spec names, its weights from a file, and a program that needs no Unskew.

A spec is one of `kinds`. Nothing is ever downloaded: libraries give their networks with initial weights, and the real
ones come from a file. Of files with weights only tensors are read, from safetensors or by torch's restricted
unpickler. A program of `torch.export` can hide code, and is read only where its source is trusted.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import inspect
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unskew.errors import COUNT, DataError, UsageError, check_number
from unskew.inputs import WORDS
from unskew.models import networks
from unskew.results import load_tree, replacing, save_tree
from unskew.specs import called, converted, defaults_of, own, parse
from unskew.tree import Tree

kinds = {
    "net.py:build": "a function in your own file that returns an nn.Module",
    "torchvision:resnet18": "a network of torchvision",
    "timm:vit_tiny_patch16_224": "a network of timm",
    "transformers:bert": "a model type of transformers, or a folder that holds its config.json",
    "model.pt2": "a program of torch.export",
    "cnn:channels=3:size=32": f"a network of Unskew's: {', '.join(networks)}",
}


# -------- Modules --------


def load_module(spec: str, classes: int | None = None, trust: bool = False) -> nn.Module:
    """The module that a spec names (see `kinds`), with initial weights unless it is a program.

    `classes` is the number of logits, where the module leaves that open: a function of the user's is given it if it
    has a parameter of that name. `trust` allows a program of `torch.export`, which can run code when it is read.

    >>> load_module("small-cnn:channels=1:size=8", classes=3).classifier
    Linear(in_features=64, out_features=3, bias=True)
    """
    if classes is not None:
        check_number("classes", classes, COUNT)
    source, _, rest = spec.partition(":")
    if spec.endswith(".pt2"):
        return _program(spec, trust)
    if source in libraries:
        return called("model", spec, libraries[source], rest, classes)
    if source not in networks and not (source.endswith(".py") and rest):
        near = difflib.get_close_matches(source, [*networks, *libraries], n=1, cutoff=0.5)
        hint = f" did you mean {near[0]!r}?" if near else ""
        listed = "; ".join(f"{example} ({words})" for example, words in kinds.items())
        raise UsageError(f"model is {spec!r}, which is of no known kind:{hint} Allowed are {listed}")
    if source in networks and classes is None:
        raise UsageError(f"model is {spec!r}, a network of Unskew's, and classes is not given: say how many it has")
    name, options = parse(spec)
    function = networks[name] if name in networks else own("model", name)
    defaults = {key: value for key, value in defaults_of(function).items() if key != "classes"}
    given: dict[str, Any] = converted(spec, options, defaults)
    if classes is not None and "classes" in inspect.signature(function).parameters:
        given["classes"] = classes
    module = called("model", spec, function, **given)
    if not isinstance(module, nn.Module):
        raise UsageError(f"model is {spec!r}: it returned {type(module).__name__}, not an nn.Module")
    return module


def _program(path: str, trust: bool) -> nn.Module:
    """The module of an exported program."""
    if not trust:
        raise UsageError(
            f"model is {path!r}, a program of torch.export: reading it can run code that is hidden in it. "
            "Add --trust (trust=True) if you trust whoever made it, or give the module's own code and its weights"
        )
    if not Path(path).is_file():
        raise DataError(f"{path}: there is no such file")
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no archive")
        return torch.export.load(path).module()
    except Exception as error:
        raise DataError(f"{path}: not a readable program of torch.export, or cut short ({_line(error)})") from error


def imported(library: str) -> Any:
    """A library that is not among Unskew's own."""
    package = library.partition(".")[0]
    try:
        return importlib.import_module(library)
    except ModuleNotFoundError as error:
        raise UsageError(f"{package} can't be imported ({error}): pip install {package}") from None
    except Exception as error:  # a torchvision that was built for another torch fails with a RuntimeError
        raise UsageError(
            f"{package} can't be imported ({_line(error)}): if it was built for another torch than "
            f"{torch.__version__}, which is here, install the {package} that belongs to it"
        ) from None


def check_known(library: str, name: str, names: Iterable[str]) -> None:
    """Refuse a name that a library does not have, with near ones; unlike `lookup` not with all: there are hundreds."""
    names = sorted(names)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=5, cutoff=0.5)
        hint = f": did you mean {' or '.join(map(repr, near))}?" if near else "."
        some = ", ".join(names[:3])
        raise UsageError(f"unknown model {name!r} of {library}{hint} It has {len(names)}, such as {some}")


def _torchvision(name: str, classes: int | None) -> nn.Module:
    """A classification network of torchvision."""
    models = imported("torchvision.models")
    check_known("torchvision", name, models.list_models(module=models))
    return models.get_model(name, weights=None, **({} if classes is None else {"num_classes": classes}))


def _timm(name: str, classes: int | None) -> nn.Module:
    """A network of timm; a tag behind a point, which names trained weights, is allowed and says nothing here."""
    timm = imported("timm")
    check_known("timm", name.partition(".")[0], timm.list_models())
    return timm.create_model(name, pretrained=False, **({} if classes is None else {"num_classes": classes}))


def _transformers(name: str, classes: int | None) -> nn.Module:
    """A classifier of texts or images of transformers, by its configuration."""
    library = imported("transformers")
    options = {} if classes is None else {"num_labels": classes}
    if (Path(name) / "config.json").is_file():
        config = library.AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False, **options)
    elif Path(name).is_dir() or "/" in name:
        raise UsageError(f"model is 'transformers:{name}': there is no {name}/config.json, and nothing is downloaded")
    else:
        check_known("transformers", name, library.CONFIG_MAPPING)
        config = library.CONFIG_MAPPING[name](**options)
    texts, images = library.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, library.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
    if type(config) in texts:
        return library.AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
    if type(config) in images:
        return library.AutoModelForImageClassification.from_config(config, trust_remote_code=False)
    raise UsageError(
        f"model is 'transformers:{name}', but transformers has no classifier of texts or images of the type "
        f"{config.model_type!r}: bert and vit are types that have one"
    )


libraries: dict[str, Callable[[str, int | None], nn.Module]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "transformers": _transformers,
}


# -------- Weights --------


def load_weights(module: nn.Module, path: str | Path) -> None:
    """Put the weights of a file into a module: safetensors, or a state dict that torch.save wrote."""
    put_weights(module, read_weights(path), path)


def put_weights(module: nn.Module, tree: Tree, path: str | Path) -> None:
    """Put weights, which came from a file, into a module.

    Their names may all begin with "module." or "_orig_mod.", as wrappers leave them. Of weights that several names
    share, one name is enough. Everything else must fit, and be finite.
    """
    own_tree = module.state_dict(keep_vars=True)
    tree = dict(_unprefixed(tree, own_tree))
    for name, value in own_tree.items():
        if name not in tree:
            shared = [other for other, tensor in own_tree.items() if tensor is value and other in tree]
            tree |= {name: tree[shared[0]]} if shared else {}
    both = [name for name in own_tree if name in tree]
    wrong = {
        "missing are": [name for name in own_tree if name not in tree],
        "the model does not have": [name for name in tree if name not in own_tree],
        "of another shape are": [
            f"{name} {tuple(tree[name].shape)}, in the model {tuple(own_tree[name].shape)}"
            for name in both
            if tree[name].shape != own_tree[name].shape
        ],
    }
    if any(wrong.values()):
        told = "; ".join(f"{words} {_few(names)}" for words, names in wrong.items() if names)
        raise DataError(
            f"{path}: its weights don't fit the model, {type(module).__name__}: {told}. "
            "Give the model that they were saved from, with the same number of classes"
        )
    for name in both:
        expected = own_tree[name]
        # A buffer may be infinite by intention, as a mask is: then it is so in the model already.
        finite = isinstance(expected, nn.Parameter) or bool(torch.isfinite(expected).all())
        if finite and not torch.isfinite(tree[name].to(expected.dtype)).all():
            raise DataError(f"{path}: {name} holds NaN or infinity: the training that wrote it has failed")
    module.load_state_dict(tree)


def save_weights(path: str | Path, tree: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Replace a safetensors file of weights; those that several names share are written under each."""
    save_tree(Path(path), tree, metadata)


def is_safetensors(path: Path) -> bool:
    """Whether a file begins as a safetensors file does; refused if it can't be read."""
    try:
        with path.open("rb") as file:
            return file.read(9)[8:] == b"{"  # behind the length of the header
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file") from None
    except OSError as error:
        raise DataError(f"{path}: can't be read ({error.strerror})") from None


def read_weights(path: str | Path) -> Tree:
    """The tensors in a file: safetensors, or a state dict that torch.save wrote; nothing else is unpickled.

    A state dict may stand under "state_dict", "model_state_dict" or "model", among other plain values.
    """
    path = Path(path)
    if is_safetensors(path):
        return load_tree(path)[0]
    remedy = "Save the weights alone: torch.save(model.state_dict(), path), or as safetensors"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        why = "holds more than tensors, or no tensors; the rest is not unpickled, since that can run code"
        raise DataError(f"{path}: {why}. {remedy}") from None
    except Exception as error:
        raise DataError(
            f"{path}: not a readable file of weights, or cut short ({_line(error)}). Allowed are safetensors and "
            f"state dicts. {remedy}"
        ) from None
    if isinstance(found, Mapping):
        inner = (found[key] for key in ("state_dict", "model_state_dict", "model") if key in found)
        found = next((value for value in inner if isinstance(value, Mapping)), found)
    tree = dict(found) if isinstance(found, Mapping) else {}
    if not tree or not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in tree.items()):
        what = f"with {_few([repr(name) for name in tree])}" if tree else f"of type {type(found).__name__}"
        raise DataError(f"{path}: holds something {what}, not a state dict of names and tensors. {remedy}")
    return tree


def _unprefixed(tree: Tree, own_tree: Mapping[str, Any]) -> Tree:
    """The tree without the prefixes that wrappers put before all of a module's names."""
    for prefix in ("_orig_mod.", "module.", "_orig_mod."):
        if not set(tree) & set(own_tree) and all(name.startswith(prefix) for name in tree):
            tree = {name.removeprefix(prefix): value for name, value in tree.items()}
    return tree


def _few(names: list[str], most: int = 3) -> str:
    """The first of many names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _line(error: Exception) -> str:
    """The first line of an error, after its type."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


# -------- Programs --------


def exported(model: nn.Module, example: Any, path: str | Path) -> None:
    """Write a model in eval mode as a program of `torch.export`, which runs where there is no Unskew.

    `example` is an input of at least one example: a tensor, a tuple of positional arguments or a mapping of named
    ones. Its values don't go into the file. The program takes any number of examples, in tensors that are otherwise
    of these shapes: torch.export.load(path).module()(x). Texts (inputs of whole numbers) can have any length, if the
    model allows that.
    """
    model = copy.deepcopy(model).cpu().eval()
    named = dict(example) if isinstance(example, Mapping) else {}
    args = () if named else example if isinstance(example, tuple) else (example,)
    tensors = [value for value in (*args, *named.values()) if isinstance(value, Tensor) and value.ndim]
    if not tensors:
        raise UsageError(f"example is {type(example).__name__}, with no tensor: give an input to the model")
    batch = len(tensors[0])
    words = any(str(value.dtype).removeprefix("torch.") in WORDS for value in tensors)
    shapes = torch.export.ShapesCollection()

    def here(value: Any) -> Any:
        return value.cpu() if isinstance(value, Tensor) else value

    def stand_in(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.ndim or len(value) != batch:
            return torch.ones_like(value, device="cpu")
        sizes = [max(size, 2) if words else size for size in value.shape[1:]]  # what is 1 would become a constant
        ones = torch.ones(max(batch, 2), *sizes, dtype=value.dtype)
        free = range(1, value.ndim) if words else ()
        shapes[ones] = {0: torch.export.Dim.DYNAMIC} | dict.fromkeys(free, torch.export.Dim.AUTO)
        return ones

    try:
        inputs, options = tuple(map(stand_in, args)), {name: stand_in(value) for name, value in named.items()}
        if named:
            _spell_out(model, list(named))
        dynamic = shapes.dynamic_shapes(model, inputs, options)
        program = torch.export.export(model, inputs, options, dynamic_shapes=dynamic)
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # it names files of this machine
        args, named = tuple(map(here, args)), {name: here(value) for name, value in named.items()}
        with torch.no_grad():
            torch.testing.assert_close(program.module()(*args, **named), model(*args, **named), rtol=1e-4, atol=1e-4)
    except Exception as error:
        raise UsageError(
            f"{type(model).__name__} can't be exported by torch.export ({_line(error)}): use its weights instead"
        ) from error
    with replacing(Path(path)) as temporary, temporary.open("wb") as file:
        torch.export.save(program, file)


def _spell_out(model: nn.Module, names: list[str]) -> None:
    """Give a model's forward parameters of these names: torch can't vary the sizes of what `**kwargs` holds."""
    forward = model.forward

    def spelled(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    spelled.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    model.forward = spelled
