"""Weights in files: reading them so that nothing can do harm, and putting them into a module under its own names.

Of a file only tensors are read, from safetensors or by torch's restricted unpickler. Training scripts wrap them in many
ways: beside an optimiser's state, under a name, with a prefix before each name, under names that a library has changed
since. What fits the module is found, and what was done is said.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import pickle
import re
import sys
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unskew.errors import DataError, few, one_line
from unskew.files import limits
from unskew.files.archives import opened_zip
from unskew.files.headers import TYPES
from unskew.files.pickles import check_pickled
from unskew.files.untrusted import is_memory, open_regular
from unskew.files.writing import load_tree
from unskew.tree import Tree

log = logging.getLogger(__name__)
REMEDY = "Save the weights alone: torch.save(model.state_dict(), path), or as safetensors"
USUAL = ("state_dict", "model_state_dict", "model", "module", "net", "network", "weights", "params")
_AVERAGED = re.compile(r"(^|[^a-z])(ema|swa|shadow|averaged?)([^a-z]|$)")  # of a copy that training keeps beside
_WRAPPERS = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


# -------- Reading --------


def is_safetensors(path: Path) -> bool:
    """Whether a file begins as a safetensors file does; refused if it can't be read."""
    if path.is_dir():
        raise DataError(
            f"{path}: can't be read, since it is a folder: give a file in it or, if transformers wrote it, "
            f"--model transformers:{path}"
        )
    with open_regular(path) as file:
        return file.read(9)[8:] == b"{"  # behind the length of the header


def is_script(path: Path) -> bool:
    """Whether a file is a module that torch.jit.save wrote."""
    with open_regular(path) as file:
        try:
            if not zipfile.is_zipfile(file):
                return False
            with opened_zip(file, path) as archive:
                return any(name.endswith("/constants.pkl") for name in archive.namelist())
        except Exception:  # damaged: whoever reads it says so
            return False


def read_weights(path: str | Path) -> Tree:
    """The tensors in a file: safetensors, or a state dict that torch.save wrote; nothing else is unpickled.

    A state dict may stand under a name, or under several one after the other, among other plain values.
    """
    path = Path(path)
    if is_safetensors(path):
        return load_tree(path)[0]
    if is_script(path):
        raise DataError(
            f"{path}: a module of TorchScript, not its weights. Where it may be run, write these alone: "
            f"torch.save(torch.jit.load({path.name!r}).state_dict(), 'weights.pt')"
        )
    try:
        check_pickled(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = torch.load(path, map_location="cpu", weights_only=True)
    except DataError:
        raise
    except pickle.UnpicklingError as error:
        culprit = re.search(r"GLOBAL ([\w.]+)", str(error))
        more = f" (here {culprit[1]})" if culprit else ""
        raise DataError(
            f"{path}: holds more than tensors{more}, or no tensors; the rest is not unpickled, since that can run "
            f"code. {REMEDY}; of a checkpoint that you trust: torch.save(torch.load({path.name!r}, "
            "weights_only=False)['state_dict'], 'weights.pt'), or .state_dict() where it is a whole module"
        ) from None
    except Exception as error:
        why = "it needs more memory than there is here" if is_memory(error) else one_line(error)[:300]
        raise DataError(
            f"{path}: not a readable file of weights, or cut short ({why}). Allowed are safetensors and state dicts. "
            f"{REMEDY}"
        ) from None
    sets = dict(_state_dicts(path, found, set()))
    if not sets:
        keys = [repr(name) for name in found] if isinstance(found, Mapping) and found else []
        what = f"with {few(keys)}" if keys else f"of type {type(found).__name__}"
        raise DataError(f"{path}: holds something {what}, not a state dict of names and tensors. {REMEDY}")
    name = _usual(path, list(sets))
    if len(sets) > 1:
        others = ", ".join(repr(other) for other in sets if other != name)
        log.warning("%s: the weights under %r are taken, those under %s are not", path, name, others)
    elif name:
        log.warning("%s: the weights under %r are taken", path, name)
    _check_dense(path, sets[name])
    return sets[name]


def _check_dense(path: Path, tree: Tree) -> None:
    """Refuse tensors that are none of plain numbers, and those that claim many more than the file holds."""
    limits.check("tensors", len(tree), path)
    for name, value in tree.items():
        plain = value.layout == torch.strided and not value.is_nested and not value.is_quantized
        if not plain or value.device.type != "cpu" or value.dtype not in TYPES.values():
            kinds = {"nested": value.is_nested, "quantised": value.is_quantized, "without values": value.is_meta}
            what = next((kind for kind, is_so in kinds.items() if is_so), f"{value.layout} of {value.dtype}")
            raise DataError(f"{path}: {name} is {what}, not a plain tensor of numbers. {REMEDY}")
    claimed = sum(value.numel() * value.itemsize for value in tree.values())
    limits.check("unbacked", claimed - path.stat().st_size, path)
    limits.check("memory", claimed, path)


def _state_dicts(path: Path, value: Any, seen: set[int], at: str = "", depth: int = 1) -> Iterator[tuple[str, Tree]]:
    """The state dicts in what a file holds, by the names that lead to them."""
    if not isinstance(value, Mapping) or not value or not all(isinstance(name, str) for name in value):
        return  # an optimiser's state is numbered
    if all(isinstance(entry, Tensor) for entry in value.values()):
        yield at, value if isinstance(value, dict) else dict(value)
        return
    limits.check("depth", depth, path)
    inner = {} if id(value) in seen else value  # each could be there under many names, and hold itself
    seen.add(id(value))
    for name, entry in inner.items():
        yield from _state_dicts(path, entry, seen, f"{at}.{name}".removeprefix("."), depth + 1)


def _usual(path: Path, names: list[str]) -> str:
    """Which of several state dicts is the model's."""
    plain = [name for name in names if not _AVERAGED.search(name)] or names
    for usual in USUAL:
        found = [name for name in plain if name.rpartition(".")[2] == usual or name.partition(".")[0] == usual]
        if len(found) == 1:
            return found[0]
    if len(plain) == 1:
        return plain[0]
    raise DataError(f"{path}: holds several state dicts, {few([repr(name) for name in names])}. {REMEDY}")


# -------- Names --------


def renamed(module: nn.Module, tree: Tree, path: str | Path) -> Tree:
    """Weights, which came from a file, under the names that a module has for them, as far as these can be found.

    Names may begin with what a wrapper put before them, such as "module." or "model.", or be those of an older version
    of the library.
    """
    own = module.state_dict(keep_vars=True)
    if not any(map(_WRAPPERS.search, own)):
        tree = _with_names(tree, {name: _WRAPPERS.sub("", name) for name in tree})
    if _lacking(own, tree):
        tree = _unprefixed(own, tree, path)
    if _lacking(own, tree):
        inside = _common(own)
        within = {f"{inside}.{name}": value for name, value in tree.items()}
        if inside and not _lacking(own, within):
            log.warning("%s: its weights are those of %r in the model", path, inside)
            tree = within
    if _lacking(own, tree):  # a DenseNet's names of 2017
        older = {name: re.sub(r"(denselayer\d+\.(?:norm|conv))\.([12])\.", r"\1\2.", name) for name in tree}
        tree = _with_names(tree, older)
    library: Any = sys.modules.get("transformers")
    if _lacking(own, tree) and library is not None and isinstance(module, library.PreTrainedModel):
        tree = _of_transformers(module, tree)
    return tree


def _with_names(tree: Tree, names: Mapping[str, str]) -> Tree:
    """The tensors that are in `names`, under those names; with what torch noted of the versions of a module's parts."""
    if all(old == new for old, new in names.items()) and len(names) == len(tree):
        return tree
    new = OrderedDict((names[name], value) for name, value in tree.items() if name in names)
    versions = getattr(tree, "_metadata", None)
    if versions is not None:
        moved = [(old, fresh) for old, fresh in names.items() if old.endswith(fresh)]
        start = moved[0][0].removesuffix(moved[0][1]) if moved else ""
        there = {_WRAPPERS.sub("", f"{name}."): value for name, value in versions.items()}
        new._metadata = {  # type: ignore[attr-defined]
            name[len(start) : -1]: value for name, value in there.items() if name.startswith(start)
        }
    return new


def _lacking(own: Mapping[str, Tensor], tree: Mapping[str, Tensor]) -> list[str]:
    """The names of a module that weights lack; of weights that several names share, one is enough."""
    there = {id(value) for name, value in own.items() if name in tree}
    return [name for name, value in own.items() if id(value) not in there and not _counter(name)]


def _common(names: Iterable[str]) -> str:
    """The part that all of a module's tensors are in."""
    places = zip(*(name.split(".")[:-1] for name in names), strict=False)
    return ".".join(words[0] for words in itertools.takewhile(lambda words: len(set(words)) == 1, places))


def _counter(name: str) -> bool:
    """Whether a tensor only counts batches, and was not there before torch 0.4.1."""
    return name.endswith("num_batches_tracked")


def _unprefixed(own: Mapping[str, Tensor], tree: Tree, path: str | Path) -> Tree:
    """Weights under their names without the prefix under which most of a module's names are there."""
    fits = Counter(
        name[:place] for name in tree for place in (0, *(dot.end() for dot in re.finditer(r"\.", name)))
        if name[place:] in own
    )  # fmt: skip
    if not fits:
        return tree
    most = max(fits.values())
    best = [prefix for prefix, n in fits.items() if n == most]
    plain = [prefix for prefix in best if not _AVERAGED.search(prefix)] or best
    prefix = min(plain, key=len)
    short = {name: name.removeprefix(prefix) for name in tree if name.startswith(prefix)}
    if _lacking(own, dict.fromkeys(short.values(), torch.empty(0))):
        everywhere = len(short) == len(tree)  # then a refusal tells what is truly missing
        return _with_names(tree, short) if everywhere else tree
    if len(plain) > 1:
        raise DataError(
            f"{path}: its weights are there several times, under {', '.join(map(repr, sorted(plain)))}. {REMEDY}"
        )
    others = [name for name in tree if name not in short]
    more = f"; the others are left out: {few(others)}" if others else ""
    log.warning("%s: the weights are those whose names begin with %r%s", path, prefix, more)
    return _with_names(tree, short)


def _of_transformers(module: Any, tree: Tree) -> Tree:
    """Weights under the names of transformers' present version, which renames those of older ones when it loads."""
    with quiet_transformers():
        loaded, report = type(module).from_pretrained(
            None, config=copy.deepcopy(module.config), state_dict=dict(tree), output_loading_info=True,
            ignore_mismatched_sizes=True,
        )  # fmt: skip
    absent = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    found = {name: value for name, value in loaded.state_dict().items() if name not in absent}
    raw = {name: value for name, value in tree.items() if name in absent or name in report["unexpected_keys"]}
    return {**found, **raw}


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """While weights load: without transformers' bars and reports."""
    logs: Any = sys.modules["transformers"].utils.logging
    before, bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(before)
        if bars:
            logs.enable_progress_bar()


# -------- Putting them into a module --------


def load_weights(module: nn.Module, path: str | Path) -> None:
    """Put the weights of a file into a module: safetensors, or a state dict that torch.save wrote."""
    put_weights(module, read_weights(path), path)


def put_weights(module: nn.Module, tree: Tree, path: str | Path) -> None:
    """Put weights, which came from a file, into a module; see `renamed` for their names.

    Of weights that several names share, one name is enough. Everything else must fit, and be finite.
    """
    own = module.state_dict(keep_vars=True)
    given = renamed(module, tree, path)
    full = OrderedDict(given)
    full._metadata = getattr(given, "_metadata", None) or own._metadata  # type: ignore[attr-defined]
    for name, value in own.items():
        if name not in full:
            shared = [other for other, tensor in own.items() if tensor is value and other in full]
            full |= {name: full[shared[0]]} if shared else {name: value.detach()} if _counter(name) else {}
    misfit = _misfit(own, full)
    if misfit and not _taken_anyway(module, full):
        raise DataError(
            f"{path}: its weights don't fit the model, {type(module).__name__}: {misfit}. "
            "Give the model that they were saved from, with the same number of classes"
        )
    for name, value in full.items():
        expected = own.get(name, value)
        # A buffer may be infinite by intention, as a mask is: then it is so in the model already.
        finite = name not in own or isinstance(expected, nn.Parameter) or bool(torch.isfinite(expected).all())
        if finite and not torch.isfinite(value.to(expected.dtype)).all():
            raise DataError(f"{path}: {name} holds NaN or infinity: the training that wrote it has failed")
    module.load_state_dict(full)


def _misfit(own: Mapping[str, Tensor], tree: Tree) -> str:
    """What keeps weights from a module, in words; nothing if they fit."""
    wrong = {
        "missing are": [name for name in own if name not in tree],
        "the model does not have": [name for name in tree if name not in own],
        "of another shape are": [
            f"{name} {tuple(tree[name].shape)}, in the model {tuple(value.shape)}"
            for name, value in own.items()
            if name in tree and tree[name].shape != value.shape
        ],
    }
    return "; ".join(f"{words} {few(names)}" for words, names in wrong.items() if names)


def _taken_anyway(module: nn.Module, tree: Tree) -> bool:
    """Whether a module takes weights under other names than its own, as its parts do that know their older versions."""
    try:
        copy.deepcopy(module).load_state_dict(tree)
    except (RuntimeError, ValueError):
        return False
    return True
