"""Files of images: the order of classes, every mode and format, scaling and cropping as torchvision does."""

import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image, ImageFile, ImageOps

from helpers.libraries import zoo
from unskew.data import images
from unskew.data.preparation import INTERPOLATIONS, Preparation
from unskew.errors import DataError

RANDOM = np.random.default_rng(0)


def noise(width, height, mode="RGB"):
    """A picture that has edges, and is not the same after any other scaling."""
    channels = len(Image.new(mode, (1, 1)).getbands())
    array = RANDOM.integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(array.squeeze(2) if channels == 1 else array, mode)


def encoded(image, kind="PNG", **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def decoded(content, **options):
    return images.decoded(lambda: content, "it", Preparation(**options))


# The order of classes


@settings(deadline=None)
@given(st.lists(st.integers(-(10**20), 10**20), unique=True))
def test_numbers_are_sorted_as_numbers(numbers):
    assert images.in_order(map(str, numbers), "here") == tuple(map(str, sorted(numbers)))


@settings(deadline=None)
@given(st.lists(st.text(min_size=1), unique=True))
def test_other_names_are_sorted_as_texts(names):
    assert images.in_order([*names, "a"], "here") == tuple(sorted([*names, "a"]))


def test_zeros_in_front_are_no_other_number():
    assert images.in_order(["10", "002", "01"], "here") == ("01", "002", "10")
    assert images.in_order(["10", "9", "x"], "here") == ("10", "9", "x")
    assert images.in_order(["1.5", "10", "9"], "here") == ("1.5", "10", "9")
    assert images.in_order(["²", "10", "9"], "here") == ("10", "9", "²")  # a digit to Python, not to us
    for names in (["01", "1"], ["0", "-0"], ["3", "2", "003"]):
        with pytest.raises(DataError, match="here: classes .* are the same number; rename one of them"):
            images.in_order(names, "here")


# Modes and formats


def test_grey_stays_grey_and_the_rest_becomes_rgb_as_image_folder_does():
    for mode, grey in (("1", True), ("L", True), ("LA", True), ("RGB", False), ("RGBA", False), ("CMYK", False)):
        image = Image.fromarray(RANDOM.random((5, 4)) > 0.5) if mode == "1" else noise(4, 5, mode)
        content = encoded(image, "TIFF" if mode == "CMYK" else "PNG")
        found = decoded(content)
        expected = np.asarray(image.convert("RGB"))  # what torchvision's loader does
        assert np.array_equal(found, expected[..., 0] if grey else expected), mode
        assert np.array_equal(decoded(content, channels=1), np.asarray(image.convert("RGB").convert("L"))), mode


def test_palettes_become_colours_with_or_without_transparency():
    image = noise(6, 5).quantize(16)
    expected = np.asarray(image.convert("RGB"))
    for transparency in (None, 3, bytes(range(16))):
        options = {} if transparency is None else {"transparency": transparency}
        assert np.array_equal(decoded(encoded(image, "PNG", **options)), expected)  # warnings would be errors
    assert np.array_equal(decoded(encoded(image, "GIF")), expected)
    grey = noise(6, 5, "L")
    assert np.array_equal(decoded(encoded(grey, "PNG", transparency=7)), np.asarray(grey))


@pytest.mark.parametrize(
    ("array", "kind"),
    [(np.uint16, "PNG"), (np.uint16, "TIFF"), (np.int32, "TIFF"), (np.float32, "TIFF"), (np.uint16, "PPM")],
)
def test_more_than_8_bits_are_refused_but_given_to_functions(array, kind):
    content = encoded(Image.fromarray(np.full((3, 2), 300, array)), kind)
    with pytest.raises(DataError, match="it has more than 8 bits a pixel .* convert it to 8 bits$") as error:
        decoded(content, channels=3)
    assert not isinstance(error.value, images.DamagedImage)  # nor is it skipped as such
    assert np.asarray(images.picture(lambda: content, "it", 3)).max() == 300


def test_the_orientation_of_a_camera_is_not_applied():
    image = noise(6, 4)
    exif = Image.Exif()
    exif[0x0112] = 6
    content = encoded(image, "PNG", exif=exif)
    assert ImageOps.exif_transpose(Image.open(io.BytesIO(content))).size == (4, 6)
    assert np.array_equal(decoded(content), np.asarray(image))


@pytest.mark.parametrize("kind", [*images.FORMATS, "MPO"])
def test_every_format_is_read_and_refused_when_cut_short(kind):
    image = Image.effect_noise((40, 30), 90).convert("RGB")
    several = {"save_all": True, "append_images": [image]} if kind == "MPO" else {}
    content = encoded(image, kind, **several)
    expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    assert np.array_equal(decoded(content), expected)
    whole = len(content) // 2 if kind == "MPO" else len(content)  # of two pictures the first is taken
    for length in range(0, whole * 9 // 10, whole // 23):
        with pytest.raises(images.DamagedImage, match="it can't be read as an image"):
            decoded(content[:length])


def test_formats_that_start_programs_are_not_opened(tmp_path):
    path = tmp_path / "a.png"
    Image.new("RGB", (4, 4)).save(path, "EPS")
    for read in (images.is_grey, lambda path: images.picture(path.read_bytes, str(path))):
        with pytest.raises(images.DamagedImage, match="a.png can't be read as an image: it is none of PNG, JPEG"):
            read(path)


def test_a_lack_of_memory_is_not_the_images_fault(monkeypatch):
    def fail(self):
        raise MemoryError

    monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
    with pytest.raises(DataError, match="more memory than there is here") as error:
        decoded(encoded(noise(2, 2)))
    assert not isinstance(error.value, images.DamagedImage)  # so that it is not skipped


# Scaling and cropping


@pytest.mark.parametrize(
    ("size", "options", "expected", "corner"),
    [
        ((301, 200), {"resize": 256}, (385, 256), None),  # 385.28
        ((200, 301), {"resize": 256}, (256, 385), None),
        ((257, 1000), {"resize": 7}, (7, 27), None),
        ((5, 3), {"image_size": 4}, (4, 4), None),
        ((7, 9), {"crop": 4}, (4, 4), (2, 2)),  # 1.5 and 2.5: to the even one
        ((7, 9), {"crop": 4, "offset": "floor"}, (4, 4), (1, 2)),
        ((9, 3), {"crop": 6}, (6, 6), (2, -1)),  # 1.5, and black above and below
        ((9, 3), {"crop": 6, "offset": "floor"}, (6, 6), (1, -2)),
    ],
)
def test_sizes_and_corners(size, options, expected, corner):
    image = noise(*size)
    found = images.scaled(image, Preparation(**options))
    assert found.size == expected
    if corner is not None:
        left, top = corner
        padded = np.zeros((30, 30, 3), np.uint8)
        padded[10 : 10 + size[1], 10 : 10 + size[0]] = np.asarray(image)
        side = options["crop"]
        assert np.array_equal(np.asarray(found), padded[10 + top : 10 + top + side, 10 + left : 10 + left + side])


SIZES = ((301, 200), (200, 301), (33, 47), (47, 33), (40, 40), (41, 40), (100, 7), (31, 90))
STEPS = (
    {"resize": 40, "crop": 32},
    {"resize": 41, "crop": 32, "interpolation": "bicubic"},
    {"resize": 33, "crop": 40, "interpolation": "lanczos"},
    {"resize": 37, "interpolation": "nearest"},
    {"image_size": 35, "interpolation": "bicubic"},
    {"image_size": 35, "crop": 30, "interpolation": "box"},
    {"image_size": 35, "interpolation": "hamming"},
    {"crop": 35},
    {"crop": 36},
)


@pytest.mark.parametrize("options", STEPS)
def test_pixels_are_those_of_torchvision(options):
    zoo("torchvision")
    from torchvision import transforms
    from torchvision.transforms import InterpolationMode

    mode = InterpolationMode(options.get("interpolation", "bilinear"))
    steps = []
    if "resize" in options:
        steps.append(transforms.Resize(options["resize"], mode))
    if "image_size" in options:
        steps.append(transforms.Resize((options["image_size"],) * 2, mode))
    if "crop" in options:
        steps.append(transforms.CenterCrop(options["crop"]))
    theirs = transforms.Compose([*steps, transforms.ToTensor()])
    for size in SIZES:
        for shown in ("L", "RGB"):
            image = noise(*size, shown)
            ours = decoded(encoded(image), **options)
            ours = ours[None] if shown == "L" else ours.transpose(2, 0, 1)
            assert torch.equal(torch.from_numpy(ours.astype(np.float32)) / 255, theirs(image)), (size, shown)


def test_every_interpolation_is_one_of_pillows():
    image = noise(9, 7)
    made = {
        name: images.scaled(image, Preparation(image_size=5, interpolation=name)).tobytes() for name in INTERPOLATIONS
    }
    assert made == {name: image.resize((5, 5), Image.Resampling[name.upper()]).tobytes() for name in INTERPOLATIONS}
    assert len(set(made.values())) == len(made)
