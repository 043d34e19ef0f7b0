"""The preparation that a model made elsewhere expects, as its library has it; nothing is downloaded.

What a library does is mapped exactly or refused by its name. Two things stay apart: transformers' processors that scale
tensors instead of images, as they do by default where torchvision is installed, differ by up to 5 of 255 levels here
and there; and timm and torchvision mean trained weights, which may be others than those that you give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unskew.data.preparation import INTERPOLATIONS, Preparation
from unskew.errors import DataError, UnskewError, UsageError, one_line
from unskew.models.foreign import LOCAL, broken_torchvision, check_name, imported, offline, without_broken_torchvision

Config = Mapping[str, Any]

REMEDY = "give the preparation by its options, or by a function prep.py:transform of your own"


def own_preparation(model: str) -> Preparation:
    """What a model's own configuration says of its images.

    `timm:NAME`: its pretrained configuration. `torchvision:NAME`: the transforms of its default weights.
    `transformers:FOLDER`: the preprocessor_config.json in the folder. Others have none and are refused.
    """
    source, _, name = model.partition(":")
    if source not in _READERS:
        known = " or ".join(("timm:NAME", "torchvision:NAME", "transformers:FOLDER"))
        raise UsageError(f"model is {model!r}, which does not say how its images are prepared, as {known} do: {REMEDY}")
    try:
        return _READERS[source](name)
    except UnskewError as error:
        raise type(error)(f"model is {model!r}: {error}") from error


def _refused(what: str) -> UsageError:
    return UsageError(f"its own preparation has {what}, which can't be done here: {REMEDY}")


# -------- timm and torchvision --------


def _timm(name: str) -> Preparation:
    timm = imported("timm")
    check_name("timm", name.partition(".")[0], timm.list_models())
    try:
        found = timm.get_pretrained_cfg(name)
    except Exception as error:  # an unknown tag
        raise UsageError(f"timm has no configuration of that name ({error})") from None
    if found is None:
        raise UsageError(f"timm has no configuration of it: {REMEDY}")
    data = imported("timm.data").resolve_data_config(pretrained_cfg=found.to_dict())
    channels, height, width = data["input_size"]
    mode, share = data["crop_mode"], data["crop_pct"]
    if height != width:
        raise _refused(f"input_size {tuple(data['input_size'])}, which is no square")
    if mode not in ("center", "squash"):
        raise _refused(f"crop_mode {mode!r}")
    scaled = math.floor(height / share)
    side = {"image_size" if mode == "squash" else "resize": scaled}
    return _made(**side, crop=height, interpolation=data["interpolation"], channels=channels, mean=data["mean"],
                 std=data["std"])  # fmt: skip


def _torchvision(name: str) -> Preparation:
    models = imported("torchvision.models")
    check_name("torchvision", name, models.list_models(module=models))
    found = models.get_model_weights(name).DEFAULT.transforms()
    if type(found).__name__ != "ImageClassification" or len(found.resize_size) != 1 or len(found.crop_size) != 1:
        raise _refused(f"{type(found).__name__}, which is not for the classification of images")
    return _made(resize=found.resize_size[0], crop=found.crop_size[0], interpolation=found.interpolation.value,
                 channels=len(found.mean), mean=found.mean, std=found.std)  # fmt: skip


def _made(**options: Any) -> Preparation:
    """A preparation of a library's options; those that it can't have are refused."""
    if options["channels"] not in (1, 3):
        raise _refused(f"{options['channels']} channels")
    if options.get("interpolation", "bilinear") not in INTERPOLATIONS:
        raise _refused(f"interpolation {options['interpolation']!r}")
    if "crop" in options and options["crop"] == options.get("image_size"):  # the middle is all
        del options["crop"]
    if "crop" not in options:
        options.pop("offset", None)
    return Preparation(**{**options, "mean": tuple(options["mean"]), "std": tuple(options["std"])})


# -------- transformers --------


def _transformers(name: str) -> Preparation:
    file = Path(name).expanduser() / "preprocessor_config.json"
    if not file.is_file():
        raise UsageError(f"there is no {file}, and nothing is downloaded: {REMEDY}")
    try:
        with without_broken_torchvision(), offline():  # from the import on, when transformers looks for it
            library = imported("transformers")
            found = library.AutoImageProcessor.from_pretrained(file.parent, **LOCAL)
        config = found.to_dict()
    except UnskewError:
        raise
    except Exception as error:
        broken = broken_torchvision()
        why = f", since torchvision can't be imported ({broken}): remove it, or {REMEDY}" if broken else ""
        raise DataError(f"{file} can't be read by transformers ({one_line(error):.200}){why}") from error
    kind = type(found).__name__.removesuffix("Pil").removesuffix("Fast").removesuffix("ImageProcessor")
    if kind not in _SCALES:
        raise _refused(f"{type(found).__name__} (known are those of {', '.join(_SCALES)})")
    try:
        return _of_processor(kind, config)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise DataError(f"{file} holds something that can't be meant ({type(error).__name__}: {error})") from error


def _of_processor(kind: str, config: Config) -> Preparation:
    """The preparation of one of transformers' image processors."""
    for option in ("do_pad", "do_flip_channel_order", "do_thumbnail", "do_align_long_axis"):
        if config.get(option):
            raise _refused(f"{option}=true")
    options = _SCALES[kind](config) if config.get("do_resize") else {}
    if options:
        options["interpolation"] = _PILLOW[int(config["resample"])]
    if config.get("do_center_crop"):
        crop = _square("crop_size", config["crop_size"])
        if crop != options.get("crop", crop):
            raise _refused(f"crop_size {crop} after scaling to {dict(config['size'])}")
        options["crop"] = crop
    mean, std = _moments(config)
    return _made(**options, offset="floor", channels=len(mean), mean=mean, std=std)


_PILLOW = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}  # as Pillow counts them


def _square(name: str, size: Any) -> int:
    """The side of a square that a configuration writes as a number or as height and width."""
    given = {key: value for key, value in size.items() if value is not None} if isinstance(size, Mapping) else size
    if isinstance(given, int):
        return given
    if isinstance(given, Mapping) and set(given) == {"height", "width"} and given["height"] == given["width"]:
        return int(given["height"])
    raise _refused(f"{name} {given}")


def _plain(config: Config) -> dict[str, Any]:
    """Both sides to height and width, or the shorter one to shortest_edge."""
    shorter = _shorter(config)
    return {"image_size": _square("size", config["size"])} if shorter is None else {"resize": shorter}


def _shorter(config: Config) -> int | None:
    given = {key: value for key, value in dict(config["size"]).items() if value is not None}
    return int(given["shortest_edge"]) if set(given) == {"shortest_edge"} else None


def _convnext(config: Config) -> dict[str, Any]:
    """Below 384 the shorter side to a larger one, of which the middle is cut out; else both sides."""
    side = _shorter(config)
    if side is None:
        raise _refused(f"size {dict(config['size'])}")
    return {"resize": int(side / config["crop_pct"]), "crop": side} if side < 384 else {"image_size": side}


def _levit(config: Config) -> dict[str, Any]:
    """The shorter side to 256/224 of what is said."""
    side = _shorter(config)
    return _plain(config) if side is None else {"resize": int((256 / 224) * side)}


def _poolformer(config: Config) -> dict[str, Any]:
    """The shorter side to what is said, over crop_pct."""
    if config.get("crop_pct") is None:
        return _plain(config)
    side = _shorter(config)
    return {"resize": int((_square("size", config["size"]) if side is None else side) / config["crop_pct"])}


_SCALES: dict[str, Callable[[Config], dict[str, Any]]] = {
    **dict.fromkeys(("ViT", "DeiT", "Beit", "Bit", "CLIP", "Siglip", "Pvt", "Segformer"), _plain),
    **dict.fromkeys(("MobileNetV1", "MobileNetV2", "EfficientNet"), _plain),
    **{"ConvNext": _convnext, "Levit": _levit, "PoolFormer": _poolformer},
}


def _moments(config: Config) -> tuple[list[float], list[float]]:
    """The mean and the deviation of pixels / 255 that say the same as rescaling and normalising."""
    mean, std = config.get("image_mean") or [0.0] * 3, config.get("image_std") or [1.0] * 3
    mean, std = ([value] * 3 if isinstance(value, int | float) else list(value) for value in (mean, std))
    scaling, normal = bool(config.get("do_rescale")), bool(config.get("do_normalize"))
    factor = 255 * config["rescale_factor"] if scaling else 255.0
    offset = 1.0 if scaling and config.get("rescale_offset") else 0.0
    before = [offset + (value if normal else 0.0) for value in mean]
    after = [(value if normal else 1.0) * (value if config.get("include_top") else 1.0) for value in std]
    return [value / factor for value in before], [value / factor for value in after]


_READERS: dict[str, Callable[[str], Preparation]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "transformers": _transformers,
}
