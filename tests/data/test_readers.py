"""Every reader on small files in its exact format, and on the same files cut, damaged, incomplete or hostile."""

import gzip
import io
import os
import pickle
import struct
import tarfile
import zipfile
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, strategies as st
from PIL import Image

from unskew.data import arrays, bundled, images, own_files, readers
from unskew.errors import DataError

RANDOM = np.random.default_rng(0)


def pixels(*shape):
    return RANDOM.integers(0, 256, shape, dtype=np.uint8)


def encoded(image, kind="PNG"):
    out = io.BytesIO()
    Image.fromarray(image).save(out, kind)
    return out.getvalue()


def place(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def tar_of(path, files, start=""):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(start + name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


def refused(path, reader, *words):
    with pytest.raises(DataError) as error:
        reader(path)
    assert all(word in str(error.value) for word in (str(path), *words)), str(error.value)


# Splits and digits


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60))
def test_the_split_is_fixed_and_stratified(labels):
    y = np.array(labels)
    train, test = arrays.stratified(y)
    assert sorted([*train, *test]) == list(range(len(y)))
    again = arrays.stratified(y.copy())
    assert np.array_equal(train, again[0])
    for label in set(labels):
        count = labels.count(label)
        assert (y[test] == label).sum() == max(count > 1, round(count / 5))


def test_digits_have_the_whole_range_and_a_fifth_for_testing():
    data = bundled.digits()
    assert data.x.shape == (1438, 8, 8)
    assert data.x_test.shape == (359, 8, 8)
    assert data.x.dtype == np.uint8
    assert (data.x.min(), data.x.max()) == (0, 255)
    assert len(data.labels) == 10
    assert all(abs((data.y_test == label).sum() - 36) <= 1 for label in range(10))


# idx


def idx_of(array):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_fashion_mnist_is_read_packed_or_not(tmp_path, pack):
    x, y = pixels(6, 28, 28), np.arange(6, dtype=np.uint8)
    files = []
    for number, array in enumerate((x, y, x[:2], y[:2])):
        files.append(tmp_path / str(number))
        files[-1].write_bytes(pack(idx_of(array)))
    data = readers.fashion_mnist(files)
    assert np.array_equal(data.x, x)
    assert np.array_equal(data.y_test, [0, 1])
    assert data.y.dtype == np.int64
    assert data.labels[9] == "Ankle boot"
    files[1].write_bytes(pack(idx_of(y[:5])))
    with pytest.raises(DataError, match="holds 6 images, the file of their labels 5"):
        readers.fashion_mnist(files)


def test_damaged_idx_files_are_refused(tmp_path):
    path = tmp_path / "images"
    whole = idx_of(pixels(3, 4, 4))
    packed = gzip.compress(whole)
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        refused(path, lambda path: readers.idx(path, 3))
    for length in range(2, len(packed), 7):
        path.write_bytes(packed[:length])
        refused(path, lambda path: readers.idx(path, 3))
    path.write_bytes(whole[:-1])
    refused(path, lambda path: readers.idx(path, 3), "expected 48 bytes for shape (3, 4, 4), found 47")
    path.write_bytes(whole + b"more")
    refused(path, lambda path: readers.idx(path, 3), "found 52")
    refused(path, lambda path: readers.idx(path, 1), "00000801", "00000803")
    damaged = bytearray(packed)
    damaged[-6] ^= 1  # in gzip's checksum
    path.write_bytes(damaged)
    refused(path, lambda path: readers.idx(path, 3), "CRC")
    refused(tmp_path / "absent", lambda path: readers.idx(path, 3))


# CIFAR


def cifar10_files(rows=2):
    files = {"batches.meta": {b"label_names": [b"plane", b"car"], b"num_cases_per_batch": rows}}
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        files[name] = {b"data": pixels(rows, 3072), b"labels": [0, 1][:rows], b"filenames": [b"a.png"] * rows}
    return files


def pickled(files):
    return {name: pickle.dumps(content, protocol=2) for name, content in files.items()}


def python2_batch(data, labels):
    """The opcodes of the official files, which Python 2's cPickle wrote."""
    rows, columns = data.shape
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x06cnumpy\nndarray\nq\x07K\x00\x85U\x01b\x87Rq\x08"
        + (b"(K\x01M" + struct.pack("<H", rows) + b"M" + struct.pack("<H", columns) + b"\x86")
        + b"cnumpy\ndtype\nq\x09U\x02u1K\x00K\x01\x87Rq\x0a"
        + b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        + (b"T" + struct.pack("<I", data.size) + data.tobytes() + b"tb")
    )
    listed = b"".join(b"K" + bytes([label]) for label in labels)
    return b"\x80\x02}q\x01(U\x06labelsq\x02]q\x03(" + listed + b"eU\x04dataq\x04" + array + b"u."


def test_cifar10_is_read_from_its_folder_and_from_its_archive(tmp_path):
    files = cifar10_files()
    folder = place(tmp_path / "cifar-10-batches-py", pickled(files))
    archive = tar_of(tmp_path / "cifar-10-python.tar.gz", pickled(files), "cifar-10-batches-py/")
    for path in (folder, archive):
        data = readers.cifar(path)
        assert data.labels == ("plane", "car")
        assert data.y.tolist() == [0, 1] * 5
        assert data.x.shape == (10, 32, 32, 3)
        assert np.array_equal(data.x[3].transpose(2, 0, 1).ravel(), files["data_batch_2"][b"data"][1])
        assert np.array_equal(data.x_test[0].transpose(2, 0, 1).ravel(), files["test_batch"][b"data"][0])


def test_the_official_opcodes_are_read_as_pickle_reads_them(tmp_path):
    data = pixels(3, 3072)
    files = pickled(cifar10_files()) | {"data_batch_1": python2_batch(data, [1, 0, 1])}
    found = readers.cifar(place(tmp_path, files))
    assert np.array_equal(found.x[:3].transpose(0, 3, 1, 2).reshape(3, -1), data)
    assert found.y[:3].tolist() == [1, 0, 1]


def test_arrays_in_fortran_order_are_read(tmp_path):
    files = cifar10_files()
    files["test_batch"][b"data"] = np.asfortranarray(files["test_batch"][b"data"])
    found = readers.cifar(place(tmp_path, pickled(files)))
    assert np.array_equal(found.x_test.transpose(0, 3, 1, 2).reshape(2, -1), files["test_batch"][b"data"])


def test_cifar100_has_fine_and_coarse_labels(tmp_path):
    batch = {b"data": pixels(2, 3072), b"fine_labels": [2, 0], b"coarse_labels": [1, 0]}
    meta = {b"fine_label_names": [b"apple", b"bear", b"cup"], b"coarse_label_names": [b"food", b"animal"]}
    path = tar_of(tmp_path / "c.tar.gz", pickled({"train": batch, "test": batch, "meta": meta}), "cifar-100-python/")
    fine, coarse = (readers.cifar(path, "cifar100", labels) for labels in ("fine", "coarse"))
    assert (fine.y.tolist(), fine.labels) == ([2, 0], ("apple", "bear", "cup"))
    assert (coarse.y_test.tolist(), coarse.labels) == ([1, 0], ("food", "animal"))


def test_a_hostile_pickle_is_refused_and_does_nothing(tmp_path):
    class Hostile:
        def __reduce__(self):
            return print, ("it ran",)

    files = pickled(cifar10_files())
    for hostile in (
        pickle.dumps({b"data": Hostile()}, protocol=2),
        b"cos\nsystem\n(S'touch ran'\ntR.",
        b"cnumpy.f2py\ncompile\n.",
        b"cnumpy.core.multiarray\nscalar\n.",
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.",
    ):
        place(tmp_path, files | {"data_batch_3": hostile})
        refused(tmp_path, readers.cifar, "data_batch_3", "which no CIFAR file does")


def test_damaged_pickles_are_refused_or_read_but_never_run(tmp_path):
    path = place(tmp_path, pickled(cifar10_files()))
    whole = python2_batch(pixels(1, 3072), [0])
    for length in [*range(0, 200, 3), len(whole) - 1]:
        (path / "test_batch").write_bytes(whole[:length])
        refused(path, readers.cifar, "test_batch")
    for bit in range(0, 8 * 200, 11):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        (path / "test_batch").write_bytes(damaged)
        with suppress(DataError):  # a flipped label or pixel can't be noticed; no other error may come
            readers.cifar(path)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({b"labels": [0]}, "1 labels"),
        ({b"data": pixels(2, 3071)}, "3071"),
        ({b"data": np.zeros((2, 3072), np.float32)}, "f4"),
        ({b"data": [1, 2]}, "(2,)"),
        ({b"labels": [b"a", 3]}, "labels"),
    ],
)
def test_a_cifar_batch_of_another_shape_is_refused(tmp_path, change, word):
    files = cifar10_files()
    files["data_batch_4"] |= change
    refused(place(tmp_path, pickled(files)), readers.cifar, "data_batch_4", word)


def test_an_incomplete_cifar_is_refused_by_the_missing_name(tmp_path):
    files = pickled(cifar10_files())
    del files["data_batch_5"]
    refused(place(tmp_path, files), readers.cifar, "holds no data_batch_5")
    files = cifar10_files()
    del files["data_batch_5"][b"labels"]
    refused(place(tmp_path, pickled(files)), readers.cifar, "data_batch_5", "labels")


def test_damaged_archives_are_refused(tmp_path):
    path = tar_of(tmp_path / "cifar-10-python.tar.gz", pickled(cifar10_files(1)), "cifar-10-batches-py/")
    whole = path.read_bytes()
    for length in range(0, len(whole), len(whole) // 12):
        path.write_bytes(whole[:length])
        refused(path, readers.cifar)
    for position in range(50, len(whole), len(whole) // 12):
        damaged = bytearray(whole)
        damaged[position] ^= 16
        path.write_bytes(damaged)
        refused(path, readers.cifar)


def test_links_and_outside_paths_in_an_archive_lead_nowhere(tmp_path):
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        link = tarfile.TarInfo("cifar-10-batches-py/batches.meta")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        tar.addfile(link)
        outside = tarfile.TarInfo("../../outside")
        outside.size = 2
        tar.addfile(outside, io.BytesIO(b"ab"))
    assert list(arrays.contents(path, "cifar-10-batches-py")) == ["../../outside"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.tar.gz"]


# Images


def cinic_files():
    return {
        f"{split}/{name}/{number}.png": encoded(pixels(32, 32, 3))
        for split, count in (("train", 2), ("valid", 1), ("test", 1))
        for name in readers.CIFAR10_CLASSES
        for number in range(count)
    }


def test_cinic10_trains_on_train_and_tests_on_test(tmp_path):
    files = cinic_files()
    archive = tar_of(tmp_path / "CINIC-10.tar.gz", files, "./")
    folder = place(tmp_path / "CINIC-10", files)
    for path in (archive, folder):
        data = readers.cinic10(path)
        assert data.x.shape == (20, 32, 32, 3)
        assert data.x_test.shape == (10, 32, 32, 3)
        assert data.y.tolist() == [label for label in range(10) for _ in range(2)]
        with Image.open(io.BytesIO(files["test/bird/0.png"])) as image:
            assert np.array_equal(data.x_test[2], np.asarray(image))
    for file in (folder / "test" / "cat").iterdir():
        file.unlink()
    refused(folder, readers.cinic10, "test/cat holds no image")


def tiny_files():
    wnids = ["n02", "n01"]
    files = {
        "wnids.txt": "\n".join(wnids).encode(),
        "words.txt": b"n01\tcat, house cat\nn02\tdog\nn03\tunused\n",
        "val/val_annotations.txt": b"val_0.JPEG\tn01\t0\t0\t62\t62\nval_1.JPEG\tn02\t0\t0\t1\t1\n",
        "test/images/test_0.JPEG": b"never read",
    }
    for name in wnids:
        files[f"train/{name}/images/{name}_0.JPEG"] = encoded(pixels(64, 64, 3), "JPEG")
        files[f"train/{name}/{name}_boxes.txt"] = b""
    files["val/images/val_0.JPEG"] = encoded(pixels(64, 64), "JPEG")
    files["val/images/val_1.JPEG"] = encoded(pixels(64, 64, 3), "JPEG")
    return files


def test_tiny_imagenet_keeps_its_class_order_and_turns_grey_to_colour(tmp_path):
    files = tiny_files()
    archive = tmp_path / "tiny-imagenet-200.zip"
    with zipfile.ZipFile(archive, "w") as bundle:
        for name, content in files.items():
            bundle.writestr(f"tiny-imagenet-200/{name}", content)
    folder = place(tmp_path / "tiny-imagenet-200", files)
    for path in (archive, folder):
        data = readers.tiny_imagenet(path)
        assert data.labels == ("dog", "cat, house cat")
        assert data.x.shape == data.x_test.shape == (2, 64, 64, 3)
        assert (data.y.tolist(), data.y_test.tolist()) == ([0, 1], [1, 0])
        assert np.array_equal(data.x_test[0, ..., 0], data.x_test[0, ..., 2])
    assert readers.tiny_imagenet(folder, size=16).x.shape == (2, 16, 16, 3)
    (folder / "val" / "images" / "val_1.JPEG").unlink()
    refused(folder, readers.tiny_imagenet, "val_1.JPEG of n02")
    (folder / "words.txt").unlink()
    refused(folder, readers.tiny_imagenet, "holds no words.txt")


def test_a_line_that_is_no_annotation_is_refused(tmp_path):
    files = tiny_files() | {"val/val_annotations.txt": b"\xff\xfe\n"}
    refused(place(tmp_path, files), readers.tiny_imagenet, "val/val_annotations.txt")


def test_damaged_zip_archives_are_refused(tmp_path):
    archive = tmp_path / "tiny-imagenet-200.zip"
    with zipfile.ZipFile(archive, "w") as bundle:
        for name, content in tiny_files().items():
            bundle.writestr(f"tiny-imagenet-200/{name}", content)
    whole = archive.read_bytes()
    for length in range(0, len(whole), len(whole) // 10):
        archive.write_bytes(whole[:length])
        refused(archive, readers.tiny_imagenet)
    damaged = bytearray(whole)
    damaged[whole.index(b"\xff\xd8") + 300] ^= 1
    archive.write_bytes(damaged)
    refused(archive, readers.tiny_imagenet, "CRC")


def class_files(*splits, shape=(6, 5, 3), count=5):
    return {
        f"{split}{name}/{number}.png": encoded(pixels(*shape))
        for split in splits
        for name in ("b", "a")
        for number in range(count)
    }


def test_class_folders_without_splits_get_a_fixed_one(tmp_path):
    place(tmp_path, class_files("") | {"a/notes.txt": b"", "readme.md": b"", ".hidden/x": b""})
    data, again = (own_files.class_folders(tmp_path) for _ in range(2))
    assert data.labels == ("a", "b")
    assert data.x.shape == (8, 6, 5, 3)
    assert data.y_test.tolist() == [0, 1]
    assert np.array_equal(data.x_test, again.x_test)


def test_numbers_as_names_are_in_the_order_of_numbers(tmp_path):
    folder, cache = tmp_path / "photos", tmp_path / "cache"
    for number in range(11):
        place(folder, {f"{number}/{file}.png": encoded(np.full((2, 2), number, np.uint8)) for file in range(2)})
    for _ in range(2):  # decoded, and kept
        data = own_files.class_folders(folder, cache)
        assert data.labels == tuple(map(str, range(11)))
        assert np.array_equal(data.x[:, 0, 0], data.y)
    place(folder, class_files(""))
    assert own_files.class_folders(folder, size=2).labels == ("0", "1", "10", *map(str, range(2, 10)), "a", "b")


def test_what_was_kept_in_another_order_is_read_anew(tmp_path, monkeypatch):
    folder, cache = place(tmp_path / "photos", class_files("")), tmp_path / "cache"
    monkeypatch.setattr(images, "in_order", lambda names, _: tuple(sorted(names, reverse=True)))
    monkeypatch.setattr(arrays, "_ORDER", arrays._ORDER - 1)
    assert own_files.class_folders(folder, cache).labels == ("b", "a")
    monkeypatch.undo()
    assert own_files.class_folders(folder, cache).labels == ("a", "b")


def test_what_class_folders_leave_out_is_told(tmp_path, caplog):
    place(tmp_path, class_files("train/", "test/"))
    assert len(own_files.class_folders(tmp_path).x) == 10
    assert not caplog.text
    place(
        tmp_path,
        {"train/a/notes.txt": b"", "train/a/._0.png": b"hidden", "train/b/more/0.png": b"", "valid/a/0.png": b""},
    )
    assert len(own_files.class_folders(tmp_path).x) == 10
    assert "train: left out are 1 files that are no images (a/notes.txt)" in caplog.text
    assert "1 folders inside class folders (b/more)" in caplog.text
    assert "1 folders beside train/ and test/ (valid)" in caplog.text


@pytest.mark.parametrize("name", ["test", "val", "valid", "validation"])
def test_class_folders_with_splits(tmp_path, name):
    place(tmp_path, class_files("train/", f"{name}/", shape=(4, 4), count=2))
    data = own_files.class_folders(tmp_path)
    assert data.x.shape == data.x_test.shape == (4, 4, 4)  # all grey: no channel axis
    assert data.y.tolist() == [0, 0, 1, 1]
    (tmp_path / name / "c").mkdir()
    refused(tmp_path, own_files.class_folders, "different classes: c")


def test_images_of_different_sizes_need_size(tmp_path):
    place(tmp_path, class_files("") | {"b/odd.png": encoded(pixels(9, 7))})
    refused(tmp_path, own_files.class_folders, "odd.png is 7x9", "5x6", "size=")
    assert own_files.class_folders(tmp_path, size=4).x.shape == (9, 4, 4, 3)


def test_folders_that_cannot_be_meant_are_refused(tmp_path):
    refused(tmp_path, own_files.class_folders, "0 class folders")
    place(tmp_path, class_files(""))
    (tmp_path / "empty").mkdir()
    refused(tmp_path, own_files.class_folders, "empty holds no image")
    (tmp_path / "empty").rmdir()
    (tmp_path / "a" / "0.png").write_bytes(b"no image")
    refused(tmp_path, own_files.class_folders, "a/0.png can't be read")
    (tmp_path / "a" / "0.png").write_bytes(encoded(pixels(6, 5, 3))[:60])
    refused(tmp_path, own_files.class_folders, "a/0.png can't be read")
    (tmp_path / "a" / "0.png").write_bytes(encoded(np.zeros((6, 5), np.uint16)))
    refused(tmp_path, own_files.class_folders, "a/0.png has more than 8 bits")
    (tmp_path / "a" / "0.png").unlink()
    (tmp_path / "a" / "0.png").symlink_to(tmp_path / "nowhere")
    refused(tmp_path, lambda path: own_files.class_folders(path, path / ".cache"), "a/0.png can't be read")


def test_other_modes_become_plain_colour(tmp_path):
    image = Image.fromarray(pixels(6, 5, 4), "RGBA")
    place(tmp_path, class_files(""))
    image.save(tmp_path / "a" / "alpha.png")
    image.convert("RGB").convert("P").save(tmp_path / "a" / "palette.gif")
    assert own_files.class_folders(tmp_path).x.shape[1:] == (6, 5, 3)


def test_decoded_images_are_kept_until_the_folder_changes(tmp_path, monkeypatch):
    folder, cache = place(tmp_path / "photos", class_files("")), tmp_path / "cache"
    decoded = []
    plain = images.decoded
    monkeypatch.setattr(images, "decoded", lambda *rest: decoded.append(rest[1]) or plain(*rest))

    def read(**options):
        decoded.clear()
        return own_files.class_folders(folder, cache, **options)

    first = read()
    assert decoded
    second = read()
    assert not decoded
    assert second.labels == first.labels
    assert all(np.array_equal(one, two) for one, two in zip(first[:4], second[:4], strict=True))
    assert read(size=3).x.shape[1:] == (3, 3, 3)
    place(folder, {"a/more.png": encoded(pixels(6, 5, 3))})
    assert len(read().x) == 9
    (kept,) = cache.iterdir()
    kept.write_bytes(kept.read_bytes()[:-100])
    assert len(read().x) == 9
    assert decoded
    read()
    assert not decoded
    assert [entry.name for entry in cache.iterdir()] == [kept.name]


@pytest.mark.parametrize("way", ["in place", "by a copy that keeps its time", "two change places"])
def test_images_that_were_replaced_are_read_anew(tmp_path, way):
    """Names, sizes and times may all be those of before."""

    def picture(value):
        return encoded(np.full((6, 5, 3), value, np.uint8))

    files = {
        f"{kind}/{number}.png": picture(10 * number + place) for place, kind in enumerate("ab") for number in range(4)
    }
    folder, cache = place(tmp_path / "photos", files), tmp_path / "cache"
    before = own_files.class_folders(folder, cache)
    old, other = folder / "a" / "1.png", folder / "a" / "2.png"
    times, content = old.stat(), old.read_bytes()
    old.write_bytes(other.read_bytes())
    if way == "two change places":
        other.write_bytes(content)
    if way != "in place":
        os.utime(old, ns=(times.st_atime_ns, times.st_mtime_ns))
        os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = own_files.class_folders(folder, cache)
    fresh = own_files.class_folders(folder)
    assert all(np.array_equal(one, two) for one, two in zip(after[:4], fresh[:4], strict=True))
    assert not all(np.array_equal(one, two) for one, two in zip(after[:4], before[:4], strict=True))


def test_what_changes_while_it_is_read_is_not_kept(tmp_path, monkeypatch):
    folder, cache, plain = place(tmp_path / "photos", class_files("")), tmp_path / "cache", images.decoded

    def changing(*rest):
        made = plain(*rest)
        place(folder, {"a/more.png": encoded(pixels(6, 5, 3))})
        return made

    monkeypatch.setattr(images, "decoded", changing)
    assert len(own_files.class_folders(folder, cache).x) == 8
    assert not list(cache.glob("*"))
    monkeypatch.undo()
    assert len(own_files.class_folders(folder, cache).x) == 9


def test_a_cache_that_cannot_be_written_is_only_mentioned(tmp_path, caplog):
    folder = place(tmp_path / "photos", class_files(""))
    (tmp_path / "cache").write_bytes(b"a file where a folder should be")
    assert len(own_files.class_folders(folder, tmp_path / "cache").x) == 8
    assert "not kept for next time" in caplog.text


# .npz


def npz_of(path, **changes):
    arrays = {"x_train": pixels(4, 6, 5), "y_train": np.arange(4), "x_test": pixels(2, 6, 5), "y_test": np.arange(2)}
    np.savez(path, **{key: value for key, value in (arrays | changes).items() if value is not None})
    return path


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((6, 5), (6, 5)),
        ((6, 5, 3), (6, 5, 3)),
        ((6, 5, 1), (6, 5, 1)),
        ((4, 6, 5), (6, 5, 4)),
        ((3, 6, 5), (6, 5, 3)),
        ((3, 6, 4), (3, 6, 4)),
    ],
)
@pytest.mark.parametrize("kind", ["u1", "f2", "f4", "f8"])
def test_npz_images_come_out_channels_last(tmp_path, shape, expected, kind):
    x = pixels(4, *shape).astype(kind)
    data = own_files.npz(npz_of(tmp_path / "a.npz", x_train=x, x_test=x[:2]))
    assert data.x.shape == (4, *expected)
    assert data.x.dtype == (np.uint8 if kind == "u1" else np.float32)
    assert np.array_equal(data.x if shape == expected else np.moveaxis(data.x, 3, 1), x)
    assert data.labels is None


def test_npz_vectors_and_names(tmp_path):
    x = np.ones((4, 7))
    data = own_files.npz(npz_of(tmp_path / "a.npz", x_train=x, x_test=x[:2], labels=np.array(["p", "q", "r", "s"])))
    assert data.x.shape == (4, 7)
    assert data.labels == ("p", "q", "r", "s")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"x_train": None, "y_test": None}, "lacks x_train, y_test"),
        ({"x_train": pixels(4, 6, 5, 7)}, "(4, 6, 5, 7)"),
        ({"x_train": pixels(4, 6)}, "(4, 6)"),
        ({"x_test": np.zeros((2, 6, 5), int)}, "x_test is int64"),
        ({"y_train": np.zeros(4)}, "y_train is float64"),
        ({"y_test": np.zeros((2, 1), int)}, "y_test is int64 of shape (2, 1)"),
        ({"x_train": np.array([None, print])}, "x_train.npy holds object, not numbers"),
    ],
)
def test_an_npz_file_of_another_kind_is_refused(tmp_path, changes, word):
    refused(npz_of(tmp_path / "a.npz", **changes), own_files.npz, word)


def test_damaged_npz_files_are_refused(tmp_path):
    path = npz_of(tmp_path / "a.npz")
    whole = path.read_bytes()
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        refused(path, own_files.npz)
    damaged = bytearray(whole)
    damaged[whole.index(b"\x93NUMPY") + 140] ^= 1  # a pixel
    path.write_bytes(damaged)
    refused(path, own_files.npz, "CRC")
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    refused(path, own_files.npz)
    refused(tmp_path / "absent.npz", own_files.npz)
