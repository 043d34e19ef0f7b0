"""Models made elsewhere: the module that a spec names.

A spec is one of `kinds`. Nothing is ever downloaded: libraries give their networks with initial weights, and the real
ones come from a file (`weights`), or from a folder that transformers has written. A program of `torch.export` can hide
code, and is read only where its source is trusted.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import warnings
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unskew.errors import COUNT, DataError, UsageError, check_number, few, one_line
from unskew.files.untrusted import read_json
from unskew.models.networks import check_made, check_memory, networks
from unskew.models.placeholders import in_place_of
from unskew.models.weights import is_script, quiet_transformers
from unskew.specs import call_user_code, converted, defaults_of, is_own, load_function, parse

kinds = {
    "net.py:build": "a function or a class in your own file that gives an nn.Module",
    "package.net:Net": "the same in a module of Python's, importable from the working directory",
    "torchvision:resnet18": "a network of torchvision",
    "timm:vit_tiny_patch16_224": "a network of timm",
    "transformers:bert": "a model type of transformers, or a folder of its save_pretrained",
    "model.pt2": "a program of torch.export",
    "cnn:channels=3:size=32": f"a network of Unskew's: {', '.join(networks)}",
    "runs/demo": "the folder of a run, or a file of weights that Unskew has written",
}


LOCAL = {"local_files_only": True, "trust_remote_code": False}  # of whatever transformers reads


# -------- Modules --------


def load_module(spec: str, classes: int | None = None, trust: bool = False, backed: int = 0) -> nn.Module:
    """The module that a spec names (see `kinds`), with initial weights unless it brings its own (`brings_weights`).

    `classes` is the number of logits, where the module leaves that open: a function of the user's is given it if it
    has a parameter of that name. `trust` allows a program of `torch.export`, which can run code when it is read.
    A network of Unskew's is refused where it takes more memory than the limit `unbacked` beside the bytes of weights
    that are there for it, `backed`: its sizes are a few characters in a task.

    >>> load_module("small-cnn:channels=1:size=8", classes=3).classifier
    Linear(in_features=64, out_features=3, bias=True)
    """
    if classes is not None:
        check_number("classes", classes, COUNT)
    source, _, rest = spec.partition(":")
    if spec.endswith(".pt2"):
        return _program(spec, trust)
    if source in libraries:
        return call_user_code("model", spec, libraries[source], rest, classes)
    if source not in networks and not is_own(spec):
        _check_file(spec)
        near = difflib.get_close_matches(source, [*networks, *libraries], n=1, cutoff=0.5)
        hint = f" did you mean {near[0]!r}?" if near else ""
        listed = "; ".join(f"{example} ({words})" for example, words in kinds.items())
        raise UsageError(f"model is {spec!r}, which is of no known kind:{hint} Allowed are {listed}")
    if source in networks and classes is None:
        raise UsageError(f"model is {spec!r}, a network of Unskew's, and classes is not given: say how many it has")
    name, options = parse(spec)
    function = networks[name] if name in networks else load_function("model", name)
    needed = {key: 0 for key in ("channels", "size") if key in inspect.signature(function).parameters}
    defaults = {key: value for key, value in {**needed, **defaults_of(function)}.items() if key != "classes"}
    given: dict[str, Any] = converted(spec, options, defaults)
    if classes is not None and "classes" in inspect.signature(function).parameters:
        given["classes"] = classes
    if name in networks:
        check_memory(lambda: function(**given), f"model {spec!r}", backed)
    module = call_user_code("model", spec, function, **given)
    if not isinstance(module, nn.Module):
        raise UsageError(f"model is {spec!r}: it returned {type(module).__name__}, not an nn.Module")
    check_made(module)
    return module


def sized(spec: str, channels: int, size: int) -> str:
    """A spec with the channels and the size of images among its options, where its function takes what it lacks.

    >>> sized("small-cnn:size=8", channels=1, size=28)
    'small-cnn:size=8:channels=1'
    """
    name, options = parse(spec)
    function = networks[name] if name in networks else load_function("model", name)
    given = {"channels": channels, "size": size}
    taken = [key for key in given if key in inspect.signature(function).parameters and key not in options]
    return ":".join([spec, *(f"{key}={given[key]}" for key in taken)])


def brings_weights(spec: str) -> bool:
    """Whether the module of a spec has weights already: a program, or a folder of transformers that holds them."""
    library, _, name = spec.partition(":")
    return spec.endswith(".pt2") or (library == "transformers" and _has_weights(Path(name)))


def _has_weights(folder: Path) -> bool:
    files = ("model.safetensors", "pytorch_model.bin")
    return any((folder / f"{name}{end}").is_file() for name in files for end in ("", ".index.json"))


def _check_file(spec: str) -> None:
    """Refuse files that hold a model, or its weights, but no code that can be cut."""
    path = Path(spec)
    if not path.is_file():
        return
    if is_script(path):
        raise UsageError(
            f"model is {spec!r}, a module of TorchScript, whose layers can't be taken out: give the module's own code, "
            "--model net.py:build, and its weights, --weights weights.pt, from "
            f"torch.save(torch.jit.load({spec!r}).state_dict(), 'weights.pt')"
        )
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt", ".safetensors"):
        raise UsageError(
            f"model is {spec!r}, a file of weights: give it as --weights, and as --model the code that makes the "
            "model, such as net.py:build or torchvision:resnet18"
        )


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
        raise DataError(f"{path}: not a readable program of torch.export, or cut short ({one_line(error)})") from error


def imported(library: str) -> Any:
    """A library that is not among Unskew's own; if it fails since torchvision does, that is named."""
    package = library.partition(".")[0]
    try:
        return importlib.import_module(library)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == package:
            raise UsageError(f"{package} can't be imported ({error}): pip install {package}") from None
        broken = broken_torchvision()
        if broken and package == "timm":  # which needs it for data alone
            with in_place_of("torchvision"):
                return importlib.import_module(library)
        if broken and package == "torchvision":
            raise UsageError(
                f"torchvision can't be imported ({broken}): it was built for another torch than "
                f"{torch.__version__}, which is here. Install the two from the same place, as PyTorch's pages say for "
                "your machine: the torchvision that pip takes by default is built for CUDA, and wants a torch that is"
            ) from None
        raise UsageError(f"{package} can't be imported ({one_line(error)}): install it anew") from None


def broken_torchvision() -> str:
    """Why a torchvision that is installed does not import; nothing if it does, or is not there."""
    if sys.modules.get("torchvision", "") is None or importlib.util.find_spec("torchvision") is None:
        return ""
    try:
        importlib.import_module("torchvision")
    except Exception as error:
        return one_line(error)
    return ""


@contextlib.contextmanager
def without_broken_torchvision() -> Iterator[None]:
    """For transformers, which does without torchvision, but not with one that fails: let it seem not to be there."""
    if not broken_torchvision():
        yield
        return
    sys.modules["torchvision"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torchvision"]


def check_name(library: str, name: str, names: Iterable[str]) -> None:
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
    check_name("torchvision", name, models.list_models(module=models))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of initial weights to come
        return models.get_model(name, weights=None, **({} if classes is None else {"num_classes": classes}))


def _timm(name: str, classes: int | None) -> nn.Module:
    """A network of timm; a tag behind a point, which names trained weights, is allowed and says nothing here."""
    timm = imported("timm")
    check_name("timm", name.partition(".")[0], timm.list_models())
    return timm.create_model(name, pretrained=False, **({} if classes is None else {"num_classes": classes}))


def _transformers(name: str, classes: int | None) -> nn.Module:
    """A classifier of texts or images of transformers: by its configuration, or with the weights of its folder."""
    if (Path(name) / "config.json").is_file():
        check_config(Path(name) / "config.json")
    with without_broken_torchvision(), offline():
        library = imported("transformers")
        options = {} if classes is None else {"num_labels": classes}
        filled = _has_weights(Path(name))
        if (Path(name) / "config.json").is_file():
            config = library.AutoConfig.from_pretrained(name, **LOCAL, **({} if filled else options))
        elif Path(name).is_dir() or "/" in name:
            raise UsageError(
                f"model is 'transformers:{name}': there is no {name}/config.json, and nothing is downloaded"
            )
        else:
            check_name("transformers", name, library.CONFIG_MAPPING)
            config = library.CONFIG_MAPPING[name](**options)
        if type(config) in library.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            maker = library.AutoModelForSequenceClassification
        elif type(config) in library.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
            maker = library.AutoModelForImageClassification
        else:
            raise UsageError(
                f"model is 'transformers:{name}', but transformers has no classifier of texts or images of the type "
                f"{config.model_type!r}: bert and vit are types that have one"
            )
        held = sum(path.stat().st_size for path in Path(name).glob("*") if path.is_file()) if filled else 0
        check_memory(lambda: maker.from_config(config, trust_remote_code=False), f"model 'transformers:{name}'", held)
        if not filled:
            return maker.from_config(config, trust_remote_code=False)
        return _from_folder(maker, name, config, classes)


HUB = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "experts_implementation")


def check_config(path: Path) -> None:
    """Refuse a configuration by which transformers would fetch code or weights from elsewhere."""
    values = deque([read_json(path)])
    while values:
        value = values.popleft()
        if isinstance(value, dict):
            wanted = [str(value[name]) for name in HUB if "/" in str(value.get(name))]
            if value.get("use_pretrained_backbone"):
                wanted.append(f"use_pretrained_backbone with {value.get('backbone')}")
            if wanted:
                raise DataError(
                    f"{path}: it asks for {', '.join(wanted)}, which is elsewhere, and nothing is "
                    "downloaded: remove that line, if the model does without"
                )
        if isinstance(value, dict | list):
            values.extend(value.values() if isinstance(value, dict) else value)


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Let the library of Hugging Face's hub fetch nothing meanwhile, whatever a configuration names."""
    flag = "HF_HUB_OFFLINE"
    before, constants = os.environ.get(flag), sys.modules.get("huggingface_hub.constants")
    held = getattr(constants, flag, None)
    os.environ[flag] = "1"  # for a library that is imported first now
    if held is not None:
        setattr(constants, flag, True)
    try:
        yield
    finally:
        os.environ.pop(flag)
        if before is not None:
            os.environ[flag] = before
        if held is not None:
            setattr(constants, flag, held)


@quiet_transformers()
def _from_folder(maker: Any, folder: str, config: Any, classes: int | None) -> nn.Module:
    """The classifier with the weights that transformers has written; a backbone alone is given a head of zeros."""
    module, report = maker.from_pretrained(folder, config=config, output_loading_info=True, **LOCAL)
    missing = sorted(report["missing_keys"])
    inner = f"{module.base_model_prefix}."
    if report["mismatched_keys"] or any(name.startswith(inner) for name in missing):
        raise DataError(
            f"{folder}: its weights don't fit its config.json: missing or of another shape are {few(missing)}"
        )
    if missing and classes is None:
        raise UsageError(f"{folder} holds no classifier (missing are {few(missing)}): give --classes for a new one")
    if missing:
        config.num_labels = classes
        module = maker.from_pretrained(folder, config=config, **LOCAL)
        own = module.state_dict()
        for name in missing:
            own[name].zero_()
    return module


libraries: dict[str, Callable[[str, int | None], nn.Module]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "transformers": _transformers,
}
