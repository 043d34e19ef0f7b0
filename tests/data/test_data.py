"""`unskew.data.datasets`: checks and moments of data sets, crops against their slow twin, and finding data by name."""

import gzip
import io
import pickle
import re
import struct
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from torch.nn.functional import pad

from unskew.data import datasets as data, readers
from unskew.errors import DataError, UsageError


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def images(*shape, seed=0):
    return torch.randint(256, shape, generator=generator(seed), dtype=torch.uint8)


def toy(**changes):
    parts = {
        "x": images(6, 3, 5, 5),
        "y": torch.tensor([0, 1, 2, 0, 1, 2]),
        "x_test": images(2, 3, 5, 5, seed=1),
        "y_test": torch.tensor([2, 0]),
    }
    return data.dataset("toy", **(parts | changes))


# Data sets


def test_a_data_set_knows_its_shape():
    made = toy()
    assert (made.classes, made.channels, made.size) == (3, 3, 5)
    assert made.labels == ("0", "1", "2")
    assert repr(made) == "Dataset(toy: 6 + 2 examples of 3x5x5 uint8, 3 classes)"
    vectors = toy(x=torch.randn(6, 7, generator=generator()), x_test=torch.zeros(2, 7))
    assert (vectors.channels, vectors.size, vectors.mean.shape) == (7, 1, (7,))


def test_to_moves_every_tensor():
    moved = toy().to("meta")
    tensors = (moved.x, moved.y, moved.x_test, moved.y_test, moved.mean, moved.std)
    assert all(tensor.device.type == "meta" for tensor in tensors)


@pytest.mark.parametrize("chunk", [1, 100, 10**6])
@pytest.mark.parametrize("kind", ["uint8", "float", "vectors"])
def test_moments_are_those_of_all_training_examples(monkeypatch, chunk, kind):
    monkeypatch.setattr(data, "_CHUNK", chunk)
    x = images(9, 3, 4, 5)
    scaled = x.double().numpy() / 255
    if kind == "float":
        x = (x.float() / 255 + 1000).double()
        scaled = x.float().double().numpy()
    if kind == "vectors":
        x = torch.randn(9, 6, generator=generator()) * 3 + 1e4
        scaled = x.double().numpy()
    made = data.dataset("toy", x, torch.arange(9), x, torch.arange(9))
    axes = (0, 2, 3) if x.dim() == 4 else 0
    assert made.mean.dtype == made.std.dtype == torch.float32
    assert made.mean.shape == ((3, 1, 1) if x.dim() == 4 else (6,))
    np.testing.assert_allclose(made.mean.flatten(), scaled.mean(axes), rtol=1e-6)
    np.testing.assert_allclose(made.std.flatten(), scaled.std(axes), rtol=1e-6)


def test_what_does_not_vary_has_deviation_one():
    x = torch.full((50, 2, 3, 3), 0.1)
    x[:, 1] = torch.rand(50, 3, 3, generator=generator())
    made = data.dataset("toy", x, torch.zeros(50, dtype=torch.long), x, torch.zeros(50, dtype=torch.long))
    assert made.std[0] == 1
    assert 0.2 < made.std[1] < 0.4


def test_arrays_are_copied_and_narrowed():
    x, y = np.ones((2, 1, 3, 3)), np.array([0, 1], dtype=np.uint8)
    x.flags.writeable = False
    made = data.dataset("toy", x, y, x, y)
    assert made.x.dtype == torch.float32
    assert made.y.dtype == torch.int64
    y[0] = 1
    assert made.y.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": images(6, 5, 5)}, "training examples are torch.uint8 of shape (6, 5, 5); expected (N, channels"),
        ({"x": images(6, 5)}, "or (N, features) in floating point"),
        ({"x": images(6, 3, 5, 5).int()}, "training examples are torch.int32"),
        ({"x_test": images(2, 3, 5, 4)}, "differ in shape or type: (3, 5, 5)"),
        ({"x_test": images(2, 3, 5, 5).float()}, "differ in shape or type"),
        ({"x_test": images(0, 3, 5, 5), "y_test": torch.zeros(0).long()}, "no test examples"),
        ({"y": torch.zeros(5).long()}, "expected integers of shape (6,)"),
        ({"y": torch.zeros(6)}, "training labels are torch.float32"),
        ({"y_test": torch.tensor([True, False])}, "test labels are torch.bool"),
        ({"y_test": torch.tensor([0, 3])}, "test label 3 at position 1 is outside of the 3 classes 0..2"),
        ({"y": torch.tensor([0, 1, -1, 0, 1, 2])}, "training label -1 at position 2"),
        ({"labels": ("a", "b")}, "training label 2 at position 2 is outside of the 2 classes"),
        ({"y": torch.tensor([0, 1, 2, 10**9, 1, 2])}, "training label 1000000000 with 6 examples"),
    ],
)
def test_what_does_not_fit_is_refused(changes, words):
    with pytest.raises(DataError) as error:
        toy(**changes)
    assert words in str(error.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e300])
@pytest.mark.parametrize(("split", "name"), [("x", "training"), ("x_test", "test")])
def test_values_that_are_not_finite_are_refused_by_position(monkeypatch, value, split, name):
    monkeypatch.setattr(data, "_CHUNK", 100)
    parts = {"x": torch.zeros(6, 3, 5, 5).double(), "x_test": torch.zeros(2, 3, 5, 5).double()}
    parts[split][1, 2, 3, 4] = value
    with pytest.raises(DataError, match=f"{name} example 1 holds a value that is not finite"):
        toy(**parts)


# Batches


def test_normalise_gives_mean_zero_and_deviation_one():
    made = toy()
    x = data.normalise(made.x, made.mean, made.std)
    assert x.dtype == torch.float32
    torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(x.std((0, 2, 3), correction=0), torch.ones(3))
    twin = (made.x.double() / 255 - made.mean) / made.std
    torch.testing.assert_close(data.normalise(made.x, made.mean, made.std, torch.float64), twin)
    assert torch.equal(data.normalise(made.x, made.mean, made.std, torch.bfloat16), x.bfloat16())
    floats = made.x.float() / 255
    torch.testing.assert_close(data.normalise(floats, made.mean, made.std), x, atol=1e-6, rtol=1e-5)


def slow_gather(x, rows, crops, padding):
    """Pad, cut out and flip one example after the other."""
    out = torch.empty((*rows.shape, *x.shape[1:]), dtype=x.dtype)
    for place in np.ndindex(*rows.shape):
        image = pad(x[rows[place]][None].float(), (padding,) * 4, mode="reflect")[0].to(x.dtype)
        down, right = crops.shift[place].tolist()
        image = image[:, down : down + x.shape[2], right : right + x.shape[3]]
        out[place] = image.flip(-1) if crops.flip[place] else image
    return out


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    padding=st.integers(0, 4),
    channels=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_gather_equals_its_slow_twin(shape, height, width, padding, channels, seed):
    draw = generator(seed)
    x = images(7, channels, height, width)
    rows = torch.randint(7, shape, generator=draw)
    crops = data.draw_crops(shape, draw, padding)
    if min(height, width) <= padding:
        with pytest.raises(UsageError, match=f"larger than padding={padding}"):
            data.gather(x, rows, crops, padding)
        return
    found = data.gather(x, rows, crops, padding)
    assert found.dtype == torch.uint8
    assert torch.equal(found, slow_gather(x, rows, crops, padding))
    assert torch.equal(data.gather(x, rows), x[rows])


def test_every_shift_and_flip_of_one_image():
    x = torch.arange(36.0).view(1, 1, 6, 6)
    shift = torch.cartesian_prod(torch.arange(9), torch.arange(9)).to(torch.uint8)  # (81, 2)
    for flip in (False, True):
        crops = data.Crops(shift, torch.full((81,), flip))
        rows = torch.zeros(81, dtype=torch.long)
        assert torch.equal(data.gather(x, rows, crops), slow_gather(x, rows, crops, 4))


def test_images_that_are_too_small_and_vectors_are_not_cropped():
    rows, crops = torch.tensor([0]), data.draw_crops((1,), generator())
    for x in (images(2, 1, 4, 4), torch.zeros(2, 7)):
        with pytest.raises(UsageError, match="don't augment"):
            data.gather(x, rows, crops)
    assert data.gather(torch.zeros(2, 7), torch.tensor([[0, 1, 1]])).shape == (1, 3, 7)


def test_crops_are_uniform_and_depend_on_the_generator_alone():
    crops = data.draw_crops((50, 60), generator(3), padding=2)
    assert crops.shift.shape == (50, 60, 2)
    assert crops.shift.dtype == torch.uint8
    assert crops.flip.dtype == torch.bool
    counts = torch.bincount(crops.shift.flatten().long(), minlength=5)
    assert ((counts - 1200).abs() < 160).all()  # five standard deviations
    assert abs(int(crops.flip.sum()) - 1500) < 140
    torch.manual_seed(5)
    again = data.draw_crops((50, 60), generator(3), padding=2)
    assert torch.equal(crops.shift, again.shift)
    assert torch.equal(crops.flip, again.flip)


# Finding data


def test_the_table_of_known_data_is_complete():
    for name, known in data.KNOWN.items():
        assert known.name == name
        assert known.description
        for file in known.files:
            assert file.url.startswith("http")
            assert (file.checksum is None) == (file.source is None)
            assert file.checksum is None or re.fullmatch("md5:[0-9a-f]{32}|sha256:[0-9a-f]{64}", file.checksum)


def test_digits_need_no_file(tmp_path):
    made = data.load("digits", tmp_path)
    assert repr(made) == "Dataset(digits: 1438 + 359 examples of 1x8x8 uint8, 10 classes)"
    assert not list(tmp_path.iterdir())


def write_fashion(folder, end=""):
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 10), ("t10k", 5)):
        x = images(count, 4, 4).numpy()
        content = struct.pack(">4B3I", 0, 0, 8, 3, *x.shape) + x.tobytes()
        pack = gzip.compress if end else bytes
        (folder / f"{split}-images-idx3-ubyte{end}").write_bytes(pack(content))
        content = struct.pack(">4BI", 0, 0, 8, 1, count) + bytes(range(count))
        (folder / f"{split}-labels-idx1-ubyte{end}").write_bytes(pack(content))


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("inner", [".", "fashion-mnist"])
def test_files_are_found_in_both_places(tmp_path, monkeypatch, end, inner):
    write_fashion(tmp_path / inner, end)
    monkeypatch.setenv("UNSKEW_DATA", str(tmp_path))
    made = data.load("fashion-mnist", download=False)
    assert made.x.shape == (10, 1, 4, 4)
    assert made.labels[0] == "T-shirt/top"
    assert torch.equal(made.x_test[:, 0], images(5, 4, 4))


def pickled(folder, files):
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))


def photographs(folder, *names):
    content = io.BytesIO()
    Image.fromarray(images(4, 4, 3).numpy()).save(content, "PNG")
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.getvalue())


def cifar10_copy(folder):
    batch = {b"data": images(10, 3072).numpy(), b"labels": list(range(10))}
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    meta = {b"label_names": [name.encode() for name in readers.CIFAR10_CLASSES]}
    pickled(folder / "cifar-10-batches-py", dict.fromkeys(names, batch) | {"batches.meta": meta})


def cifar100_copy(folder):
    batch = {b"data": images(100, 3072).numpy(), b"fine_labels": list(range(100)), b"coarse_labels": [0] * 100}
    meta = {b"fine_label_names": [b"%d" % label for label in range(100)], b"coarse_label_names": [b"all"]}
    pickled(folder / "cifar-100-python", {"train": batch, "test": batch, "meta": meta})


def cinic10_copy(folder):
    splits = ("train", "test")
    photographs(folder / "CINIC-10", *(f"{split}/{name}/0.png" for split in splits for name in readers.CIFAR10_CLASSES))


def tiny_imagenet_copy(folder):
    home, names = folder / "tiny-imagenet-200", [f"n{number:03}" for number in range(200)]
    photographs(home, "val/images/0.png", *(f"train/{name}/images/0.png" for name in names))
    (home / "wnids.txt").write_text("\n".join(names))
    (home / "words.txt").write_text("n000\tant")
    (home / "val/val_annotations.txt").write_text("0.png\tn000")


COPIES = {  # of each known data set, a small one
    "digits": lambda folder: None,
    "fashion-mnist": write_fashion,
    "cifar10": cifar10_copy,
    "cifar100": cifar100_copy,
    "cinic10": cinic10_copy,
    "tiny-imagenet": tiny_imagenet_copy,
}


@pytest.mark.parametrize("name", data.KNOWN)
def test_every_known_data_set_has_its_reader(tmp_path, name):
    """A copy of each is read, into as many classes as its table says; scaled, if it comes as image files."""
    COPIES[name](tmp_path)
    known = data.KNOWN[name]
    assert data.load(name, tmp_path, download=False).classes == known.classes
    for label_set in known.label_sets:
        data.load(name, tmp_path, label_set=label_set, download=False)
    if known.image_files:
        assert data.load(name, tmp_path, size=2, download=False).size == 2
    else:
        with pytest.raises(UsageError, match="only for data that come as image files"):
            data.load(name, tmp_path, size=2, download=False)


def test_files_of_a_name_that_two_data_sets_have_are_those_of_its_own_folder(tmp_path, monkeypatch):
    known = data.KNOWN["fashion-mnist"]
    monkeypatch.setitem(data.KNOWN, "kmnist", replace(known, name="kmnist"))
    write_fashion(tmp_path)
    for name in ("kmnist", "fashion-mnist"):
        with pytest.raises(DataError, match=f"{name} is not there: put .* at .*/{name}/train-images"):
            data.load(name, tmp_path, download=False)
    write_fashion(tmp_path / "kmnist")
    assert data.load("kmnist", tmp_path, download=False).classes == 10


def write_cifar100(folder):
    batch = {b"data": images(2, 3072).numpy(), b"fine_labels": [2, 0], b"coarse_labels": [1, 0]}
    meta = {b"fine_label_names": [b"apple", b"bear", b"cup"], b"coarse_label_names": [b"food", b"animal"]}
    pickled(folder, {"train": batch, "test": batch, "meta": meta})


@pytest.mark.parametrize("inner", ["cifar100/cifar-100-python", "cifar100", "cifar-100-python"])
def test_an_unpacked_folder_is_found_wherever_it_may_lie(tmp_path, inner):
    write_cifar100(tmp_path / inner)
    made = data.load("cifar100", tmp_path, label_set="coarse", download=False)
    assert made.labels == ("food", "animal")
    assert torch.equal(made.x.flatten(1), images(2, 3072))
    assert data.load("cifar100", tmp_path).classes == 3


def test_what_is_missing_is_downloaded_to_its_own_folder(tmp_path, monkeypatch):
    write_fashion(tmp_path / "server", ".gz")
    asked = []

    def fetch(url, path, checksum, progress):
        asked.append(url)
        progress(1, 1)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes((tmp_path / "server" / path.name).read_bytes())
        return path

    monkeypatch.setattr(data, "fetch", fetch)
    steps = []
    place = tmp_path / "here"
    place.mkdir()
    assert len(data.load("fashion-mnist", place, progress=lambda *step: steps.append(step)).x) == 10
    assert asked == [file.url for file in data.KNOWN["fashion-mnist"].files]
    assert len(steps) == 4
    assert len(list((place / "fashion-mnist").iterdir())) == 4
    data.load("fashion-mnist", place)
    assert len(asked) == 4


def test_without_download_it_says_what_to_put_where(tmp_path):
    with pytest.raises(DataError) as error:
        data.load("cifar10", tmp_path, download=False)
    assert data.KNOWN["cifar10"].files[0].url in str(error.value)
    assert str(tmp_path / "cifar10" / "cifar-10-python.tar.gz") in str(error.value)


def test_your_own_npz_and_folder(tmp_path):
    x, y = images(6, 5, 4, 3).numpy(), np.array([0, 1, 2, 0, 1, 2])
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    made = data.load(tmp_path / "mine.npz")
    assert made.name == "mine"
    assert torch.equal(made.x.permute(0, 2, 3, 1), torch.from_numpy(x))
    for row, label in enumerate(y):
        (tmp_path / "photos" / f"class{label}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(x[row]).save(tmp_path / "photos" / f"class{label}" / f"{row}.png")
    made = data.load(str(tmp_path / "photos"), tmp_path / "store")
    assert made.labels == ("class0", "class1", "class2")
    assert made.x.shape == made.x_test.shape == (3, 3, 5, 4)
    assert len(list((tmp_path / "store" / "decoded").iterdir())) == 1
    assert data.load(tmp_path / "photos", tmp_path / "store", size=8).x.shape == (3, 3, 8, 8)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("cifr10", {}, "did you mean 'cifar10'?"),
        ("./no/such/folder", {}, "or a path to a .npz file or to a folder of class folders"),
        ("cifar10", {"label_set": "coarse"}, "label_set='coarse'"),
        ("cifar100", {"label_set": "rough"}, "label_set='rough'"),
        ("digits", {"size": 16}, "size=16 for digits"),
        ("tiny-imagenet", {"size": 0}, "size=0"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(tmp_path, name, options, words):
    with pytest.raises(UsageError) as error:
        data.load(name, tmp_path, **options)
    assert words in str(error.value)


def test_importing_data_imports_nothing_heavy():
    code = "import sys, unskew.data.datasets; print({'PIL', 'sklearn', 'rich', 'scipy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
