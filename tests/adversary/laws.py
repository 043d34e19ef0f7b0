"""What the documents say of a statistics file that is accepted, checked in NumPy without Unskew's code.

`broken` has the laws of the format, which whoever reads a file must keep; `impossible` those of moments that no data
can have, which `calibrate` refuses and `inspect` warns of.
"""

import numpy as np

from adversary import forging

HIGHEST = 1e100
STEP = {"float64": 0.0, "float32": 2.0**-24, "bfloat16": 2.0**-9, "int16": 0.5 / 32767}


def broken(raw: bytes) -> str | None:
    """The first law that a file breaks, in words."""
    file = forging.read(raw)
    for name, tensor in file.tensors.items():
        values = tensor.array().astype(float)
        if not (np.abs(values) < HIGHEST).all():
            return f"{name} is not finite, or above {HIGHEST:g}"
    held = "held_out.count" in file.tensors
    found = _part(file, "") or (_part(file, "held_out.") if held else None)
    if found is None and held and (file.array("held_out.count") > file.array("count")).any():
        return "more is held out than there is"
    return found


def impossible(raw: bytes) -> str | None:
    """The first law of moments that a file breaks, which keeps the laws of the format."""
    file = forging.read(raw)
    starts = ["", "held_out."] if "held_out.count" in file.tensors else [""]
    return next(filter(None, (_rank(file, start) for start in starts)), None) or _held_out(file)


def _part(file: forging.Forgery, start: str) -> str | None:
    """The laws of all examples, or of those that are held out."""
    count, mean = file.array(f"{start}count"), file.array(f"{start}mean")
    told = file.get("held_out" if start else "examples")
    if (count < 0).any() or (count != np.round(count)).any():
        return f"{start}count is negative or fractional"
    if count.sum() != told:
        return f"{start}count adds up to {count.sum():g}, but the header says {told}"
    if mean[count == 0].any():
        return f"{start}mean of a class without examples"
    form = "pooled" if start else file.get("form")
    if form == "none":
        return None
    room = 1e-8 + 2 * mean.shape[1] * STEP[file.get("precision")]
    for label, scatter in enumerate(_scatters(file, start, form)):
        examples = count[label] if form in ("class", "diagonal") else count.sum()
        size = np.abs(np.diag(scatter)).max(initial=0.0)
        if examples == 0 and size > 0:
            return f"{start}scatter of class {label}, which has no examples"
        if size == 0:
            continue
        found = np.linalg.eigvalsh(_unit(scatter))
        if found.min() < -room * len(scatter):
            return f"{start}scatter is not positive semidefinite ({found.min():.2g})"
    return None


def _rank(file: forging.Forgery, start: str) -> str | None:
    """Examples that can't differ from their class's mean have no scatter."""
    count, mean = file.array(f"{start}count"), file.array(f"{start}mean")
    form = "pooled" if start else file.get("form")
    if form == "none":
        return None
    for label, scatter in enumerate(_scatters(file, start, form)):
        alone = form in ("class", "diagonal")
        free = count[label] - 1 if alone else count.sum() - (count > 0).sum()
        if free < 1 and np.abs(scatter).max(initial=0.0) > 1e-6 * (1 + np.abs(mean).max() ** 2):
            return f"{start}scatter of examples that can't differ"
    return None


def _held_out(file: forging.Forgery) -> str | None:
    """The held-out part is a part, in second moments too where both are known."""
    if "held_out.count" not in file.tensors:
        return None
    if file.get("form") == "none":
        return None
    whole = np.trace(_second(file, "", file.get("form")))
    held = np.trace(_second(file, "held_out.", "pooled"))
    if held > whole * (1 + 1e-6 + 60 * STEP[file.get("precision")]):
        return f"held-out squares are {held:.3g}, of {whole:.3g} in all"
    return None


def _unit(scatter: np.ndarray) -> np.ndarray:
    """In units of each feature's own deviation, so that a small feature is not overlooked."""
    scale = np.sqrt(np.where(np.diag(scatter) > 0, np.diag(scatter), 1.0))
    return scatter / scale / scale[:, None]


def _second(file: forging.Forgery, start: str, form: str) -> np.ndarray:
    """The sum of z z' over all examples."""
    count, mean = file.array(f"{start}count"), _means(file, start)
    return sum(_scatters(file, start, form)) + (mean.T * count) @ mean


def _means(file: forging.Forgery, start: str) -> np.ndarray:
    count, mean = file.array(f"{start}count"), file.array(f"{start}mean").astype(float)
    return (
        np.where(count[:, None] > 0, mean + file.array(f"{start}centre"), 0)
        if f"{start}centre" in file.tensors
        else mean
    )


def _scatters(file: forging.Forgery, start: str, form: str) -> list[np.ndarray]:
    """Full matrices: one, or one for each class."""
    held = file.array(f"{start}scatter").astype(float)
    width = file.array(f"{start}mean").shape[1]
    if form == "diagonal":
        return [np.diag(row) for row in held]
    rows = held if form == "class" else [held]
    found = []
    for label, row in enumerate(rows):
        full = np.zeros((width, width))
        full[np.triu_indices(width)] = row
        full = full + np.triu(full, 1).T
        if f"{start}spread" in file.tensors:
            spread = file.array(f"{start}spread").astype(float)
            spread = spread[label] if form == "class" else spread
            full = full * np.outer(spread, spread) / 32767
        found.append(full)
    return found
