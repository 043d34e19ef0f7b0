"""The data sets that are known by name: what each is, its files with their checksums, and who reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from unskew.data import bundled, readers
from unskew.data.arrays import Arrays


@dataclass(frozen=True)
class File:
    """A file to download: where from, and by which checksum it is known."""

    url: str
    checksum: str | None  # "md5:..." or "sha256:..."; None: unverified
    source: str | None  # who published or confirmed that checksum

    @property
    def name(self) -> str:
        """The file's own name."""
        return self.url.rpartition("/")[2]


class Found(NamedTuple):
    """What a reader is given of a known data set."""

    paths: list[Path]  # the folder that its archive unpacks to, or its files in the order of `KnownData.files`
    cache: Path  # where decoded images are kept
    size: int | None  # to which images are scaled
    label_set: str


@dataclass(frozen=True)
class KnownData:
    """A data set that `load` knows by name."""

    name: str
    description: str
    classes: int
    reader: Callable[[Found], Arrays]
    files: tuple[File, ...] = ()  # one archive, or the data's own files
    folder: str = "."  # what its archive unpacks to
    marker: str = ""  # what lies in that folder; empty: there is no such folder
    image_files: bool = False  # it comes as image files, which can be scaled as they are read
    label_sets: tuple[str, ...] = ("fine",)  # the first is that of `classes`


_KRIZ = "https://www.cs.toronto.edu/~kriz/"
_KRIZ_PAGE = "www.cs.toronto.edu/~kriz/cifar.html and torchvision"
_ZALANDO = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"
_ZALANDO_PAGE = "README of github.com/zalandoresearch/fashion-mnist"
_STANFORD = "http://cs231n.stanford.edu/"
_EDINBURGH = "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/"
# We have no checksum from these two publishers; those below are what the named loaders compare with.
_EDINBURGH_PAGE = "github.com/vaseline555/Federated-Learning-in-PyTorch"
_TINY_PAGE = "github.com/ContinualAI/avalanche"

_KNOWN = (
    KnownData(
        "digits",
        "1,797 handwritten digits, 8x8 grey; part of scikit-learn, no download",
        10,
        lambda found: bundled.digits(),
    ),
    KnownData(
        "fashion-mnist",
        "60,000 + 10,000 articles of clothing, 28x28 grey",
        10,
        lambda found: readers.fashion_mnist(found.paths),
        (
            File(f"{_ZALANDO}train-images-idx3-ubyte.gz", "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d", _ZALANDO_PAGE),
            File(f"{_ZALANDO}train-labels-idx1-ubyte.gz", "md5:25c81989df183df01b3e8a0aad5dffbe", _ZALANDO_PAGE),
            File(f"{_ZALANDO}t10k-images-idx3-ubyte.gz", "md5:bef4ecab320f06d8554ea6380940ec79", _ZALANDO_PAGE),
            File(f"{_ZALANDO}t10k-labels-idx1-ubyte.gz", "md5:bb300cfdad3c16e7a12a480ee83cd310", _ZALANDO_PAGE),
        ),
    ),
    KnownData(
        "cifar10",
        "50,000 + 10,000 photographs of animals and vehicles, 32x32 colour",
        10,
        lambda found: readers.cifar(found.paths[0], "cifar10"),
        (File(f"{_KRIZ}cifar-10-python.tar.gz", "md5:c58f30108f718f92721af3b95e74349a", _KRIZ_PAGE),),
        "cifar-10-batches-py",
        "batches.meta",
    ),
    KnownData(
        "cifar100",
        "50,000 + 10,000 photographs, 32x32 colour; 100 fine or 20 coarse classes",
        100,
        lambda found: readers.cifar(found.paths[0], "cifar100", found.label_set),
        (File(f"{_KRIZ}cifar-100-python.tar.gz", "md5:eb9058c3a382ffc7106e4002c42a8d85", "torchvision"),),
        "cifar-100-python",
        "meta",
        label_sets=("fine", "coarse"),
    ),
    KnownData(
        "cinic10",
        "90,000 + 90,000 photographs in CIFAR-10's classes, 32x32 colour; its validation part is not used",
        10,
        lambda found: readers.cinic10(found.paths[0], found.cache, found.size),
        (File(f"{_EDINBURGH}CINIC-10.tar.gz", "md5:6ee4d0c996905fe93221de577967a372", _EDINBURGH_PAGE),),
        "CINIC-10",
        "train/airplane",
        image_files=True,
    ),
    KnownData(
        "tiny-imagenet",
        "100,000 + 10,000 photographs, 64x64 colour; tested on its validation part",
        200,
        lambda found: readers.tiny_imagenet(found.paths[0], found.cache, found.size),
        (File(f"{_STANFORD}tiny-imagenet-200.zip", "md5:90528d7ca1a48142e341f4ef8d21d0de", _TINY_PAGE),),
        "tiny-imagenet-200",
        "wnids.txt",
        image_files=True,
    ),
)
KNOWN: dict[str, KnownData] = {known.name: known for known in _KNOWN}
