"""What the numbers of a training may be: `Training` and `Experiment` check them alike. Nothing here needs torch."""

from __future__ import annotations

from unskew.errors import COUNT, DECAY, NOT_NEGATIVE, SHARE, Allowed

RULES: dict[str, Allowed] = {
    "rounds": COUNT, "epochs": COUNT, "steps": COUNT, "batch": COUNT, "lr": NOT_NEGATIVE, "momentum": DECAY,
    "weight_decay": NOT_NEGATIVE, "fraction": SHARE,
}  # fmt: skip
