"""Candidate heads: they go to the sites in one sealed file, signed if the server has a key; `answers` has what they
answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from unskew.calibration.calibrator import behind, plain
from unskew.conversation.agreement import Known
from unskew.conversation.model_file import known_from_json, origin_to_json
from unskew.errors import DataError
from unskew.files import limits
from unskew.files.signing import Key, Signed, is_name, is_nonce, is_signature, signature_of
from unskew.files.untrusted import Source, parse_json, reading
from unskew.files.writing import digest, load_sealed, metadata_of, seal, tree_bytes
from unskew.models.networks import Split, linear, linear_of
from unskew.models.transforms import Transform, front_of
from unskew.statistics.collecting import weights_digest
from unskew.statistics.fingerprints import Part
from unskew.statistics.moments import FeatureStats
from unskew.tree import Tree

OLD = "old"  # the name of the head that the model has
MOST_HEADS = 16
PROPOSE = "`unskew calibrate --propose` writes them"


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
        "statistics": digest(sorted(part.digest for part in stats.parts)),
        "data": json.dumps(origin_to_json(stats.origin)),
        "nonce": json.dumps(stats.origin.nonce), "site": json.dumps(None if key is None else key.name),
        "hold_out": json.dumps(hold_out),
    }  # fmt: skip
    if key is not None:
        about["signature"] = signature_of(key, "heads", stats.origin.nonce, seal(tree, about))
    return tree_bytes(tree, {**about, "seal": seal(tree, about)})


def known_of_heads(path: Path) -> Known:
    """What a file of candidate heads says of the data that they were made from."""
    with reading(path, f"holds no heads, or damaged ones; {PROPOSE}"):
        return known_from_json(path, parse_json(metadata_of(path)["data"], f"{path}: what it says of its data"))


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
    biased, kind = bias is None or bias.shape == expected[:1], linear(model.classifier).weight.dtype
    if weight.shape != expected or not biased or weight.dtype != kind:
        raise DataError(f"{name!r} is {weight.dtype} of shape {tuple(weight.shape)}; it must be {kind} of shape "
                        f"{expected}: let the server load this model")  # fmt: skip
    if not all(torch.isfinite(value).all() for value in (weight, bias) if value is not None):
        raise DataError(f"{name!r} holds NaN or infinity")
    return behind(linear_of(weight, bias), front, model.dimension)
