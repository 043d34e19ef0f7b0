"""Sites for tests: small images and tables on disk, the data of a site as a whole, and what is refused of it."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from PIL import Image

from unskew.data import sites
from unskew.data.preparation import Preparation

RANDOM = np.random.default_rng(0)
CLASSES = ("ant", "bee", "cow", "dog")


def site_data(spec, **options):
    """The data of a site; options of its preparation stand among the others."""
    names = {entry.name for entry in fields(Preparation)} & set(options)
    preparation = Preparation(**{name: options.pop(name) for name in names})
    return sites.site_data(spec, preparation=preparation, **options)


def pixels(*shape):
    return RANDOM.integers(0, 256, shape, dtype=np.uint8)


def put(path, image):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)
    return path


def photos(root, counts, shape=(6, 5, 3)):
    """Class folders with so many images; the images by their paths inside."""
    images = {f"{name}/{number}.png": pixels(*shape) for name, count in counts.items() for number in range(count)}
    for name, image in images.items():
        put(root / name, image)
    return images


def csv_of(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def whole(site):
    x, y = zip(*site.batches(), strict=True)
    return torch.cat(x), torch.cat(y)


def refused(kind, words, spec, **options):
    with pytest.raises(kind) as error:
        list(site_data(str(spec), **options).batches())
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"{missing} not in: {error.value}"
