"""The conversation by files: what sites have sent, compared by their headers before any contents are read.

Files come from others, and say what the model is to be run on. So they are compared with the task and with each other
first, and their weights with the model's before anything is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import nn

from unskew.conversation.agreement import Known, apart, check_known, few, images_of, takes
from unskew.conversation.model_file import Opened, open_model
from unskew.conversation.tasks import Task, check_header
from unskew.data.preparation import Preparation
from unskew.errors import DataError, UsageError
from unskew.files.signing import Key, Sites, check_senders, check_signed
from unskew.files.untrusted import reading
from unskew.models.inputs import check_size, stand_in, varies
from unskew.statistics.collecting import digests_before, weights_digest
from unskew.statistics.file import check_role
from unskew.statistics.header import Header, read_header

MOST_NAMES = 20  # that are told


class SiteFiles(NamedTuple):
    """The sites' files that are used, by their headers."""

    known: dict[Path, Header]
    own: list[Path]  # sites' own, to be added
    sums: list[Path]  # to be added too
    removed: list[Path]  # to be taken out of what is added

    @property
    def kept(self) -> list[Path]:
        """All to be added, sums last."""
        return [*self.own, *self.sums]

    @property
    def forms(self) -> set[str]:
        """The forms of the second moments that are used."""
        return {header.form for header in self.known.values()}

    @property
    def apart(self) -> bool:
        """Whether sites are known apart."""
        return not self.removed and not self.sums


def read_site_files(files: Sequence[Path], sums: Sequence[Path] = (), without: Sequence[Path] = ()) -> SiteFiles:
    """Read the headers of sites' files and of sums; those of `without` are left out or, where they are in a sum, taken
    out of it.
    """
    known = {path: read_header(path) for path in (*files, *sums, *without)}
    for path, header in known.items():
        check_role(path, header, path in sums)
        if not header.examples:
            raise DataError(f"{path}: the site has no examples: leave its file out")
    kept, removed = [*files, *sums], list[Path]()
    for path in without:
        same = [other for other in kept if known[other].digest == known[path].digest]
        if same:
            kept.remove(path if path in same else same[0])
        else:
            removed.append(path)
    if not kept:
        raise UsageError("--without leaves no file to calibrate from: name fewer")
    used = {path: known[path] for path in (*kept, *removed)}  # what is left out needs no key, and may be of any kind
    return SiteFiles(
        used, [path for path in kept if path not in sums], [path for path in kept if path in sums], removed
    )


def check_signatures(sent: SiteFiles, sites: Sites | None, server: Key | None) -> list[str]:
    """Refuse files that the sites have not signed where their keys are given, and sums that are not this server's where
    its own key is. Tells what was not checked, and who was not heard.
    """
    told = []
    if sites is not None:
        check_senders([(path, sent.known[path].signed) for path in sent.own], sites)
        heard = [sent.known[path].site for path in sent.kept]
        heard += [part.site for path in sent.sums for part in sent.known[path].parts]
        told += silent(sites, [*heard, server.name if server else None], "has sent no statistics")
        told += [f"{path}: who wrote this sum is not checked: --sign with the server's key does"
                 for path in sent.sums if server is None]  # fmt: skip
    if server is not None:
        for path in sent.sums:
            check_signed(path, sent.known[path].signed, Sites(f"{server.name}.key", {server.name: server.public}))
    return told


def silent(sites: Sites, heard: Iterable[str | None], what: str) -> list[str]:
    """In words, who has a key and is not among those that were heard; nothing if all were."""
    missing = sorted(set(sites.keys) - set(heard))
    more = f" and {len(missing) - MOST_NAMES} more" if len(missing) > MOST_NAMES else ""
    told = f"of those with a key in {sites.where}, {', '.join(missing[:MOST_NAMES])}{more} {what}"
    return [told] if missing else []


def check_sources(
    known: Mapping[Path, Header], task: Task | None, where: Path | None, sources: Iterable[Known]
) -> None:
    """Refuse statistics that are not of the task, which stands in `where`, or contradict another source."""
    for path, header in known.items():
        if task is not None:
            check_header(task, where, path, header)
        said = header.origin.preparation
        with reading(path):
            preparation = None if said is None else Preparation.parse(said)
        check_known(Known(str(path), header.origin.labels, preparation, header.origin.inputs), sources)
        expected, found = None if task is None else images_of(task.preparation), header.origin.inputs
        if expected is not None and found is not None and not takes(expected, found):
            raise DataError(f"{path}: its inputs are {found}, but {where} makes them {expected}: let the site run "
                            f"`unskew stats --task {where}`")  # fmt: skip


def check_alike(known: Mapping[Path, Header]) -> None:
    """Refuse files that can't be added, by the names of the few that differ from the others."""
    files = {str(path): header for path, header in known.items()}
    for name in ("classes", "dimension", "transform", "layer", "inputs", "labels", "preparation"):
        of_header = name in ("classes", "dimension", "transform")
        said = {file: getattr(header if of_header else header.origin, name) for file, header in files.items()}
        if problem := apart(name, said):
            raise DataError(f"{problem.words}. Statistics of different {name} can't be added: collect all of them with "
                            "the same model on the same kind of data, or leave such files out")  # fmt: skip


# ---------------------------------------------------------------------------------------------- the model


def open_for(
    sent: SiteFiles, spec: str, weights: Path | None, *, classes: int | None = None, layer: str | None = None,
    trust: bool = False,
) -> Opened:  # fmt: skip
    """The model that the files were made with; refused if they were made with another, before it is run on anything
    that they ask for.
    """
    known, first = sent.known, sent.kept[0]
    told, inputs = (_said(known, name) for name in ("layer", "inputs"))
    seen = inputs is not None and not varies(inputs)
    if inputs is not None and seen:
        check_size(inputs, first)

    def check(module: nn.Module) -> None:
        """Compare the weights before anything is run."""
        found = set[str]().union(*(digests_before(module, name) for name in (told, layer)))
        if found:
            _check_weights(found, known, spec, weights)
        elif told is not None:
            said = ", ".join(str(path) for path, header in known.items() if header.origin.layer is not None)
            raise UsageError(f"{spec} has no layer {told!r}, of which {said} has features: give the right model")

    found = open_model(spec, weights, classes=classes, layer=layer or (None if seen else told), trust=trust,
                       example=stand_in(inputs) if inputs is not None and seen else None, check=check)  # fmt: skip
    if known[first].classes != found.model.classes:
        raise UsageError(
            f"{first} has {known[first].classes} classes, but the model has {found.model.classes}: give --classes "
            f"{known[first].classes} for a new head, as the sites did, or the right model"
        )
    _check_weights({weights_digest(found.model)}, known, spec, weights)
    return found


def _said(known: Mapping[Path, Header], name: str) -> str | None:
    """What the files say of their origin, which is the same for all that say it."""
    return next((value for header in known.values() if (value := getattr(header.origin, name)) is not None), None)


def _check_weights(digests: set[str], known: Mapping[Path, Header], spec: str, weights: Path | None) -> None:
    strange = [str(path) for path, header in known.items() if header.origin.weights not in (None, *digests)]
    if strange:
        hint = "" if weights else "; without --weights, the model must be built the same everywhere"
        raise UsageError(f"{few(strange)}: collected with other weights "
                         f"than {weights or spec}: collect again{hint}")  # fmt: skip
