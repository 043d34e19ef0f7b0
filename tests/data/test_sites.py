"""A site's data as batches: arrays, known data sets, tables and loaders, sites that lack classes, what is refused."""

import sys

import numpy as np
import pytest
import torch

from helpers.site_files import CLASSES, RANDOM, csv_of, photos, pixels, refused, site_data, whole
from unskew.data import datasets as data, tables as tabular
from unskew.data.sites import read_labels
from unskew.errors import DataError, UsageError
from unskew.models import evaluate

# .npz


@pytest.mark.parametrize(
    ("shape", "expected"), [((6, 5), (1, 6, 5)), ((6, 5, 3), (3, 6, 5)), ((3, 6, 5), (3, 6, 5)), ((1, 6, 5), (1, 6, 5))]
)
def test_an_npz_of_images(tmp_path, shape, expected):
    x = pixels(7, *shape)
    path = tmp_path / "site.npz"
    np.savez(path, x=x, y=np.array([3, 0, 3, 1, 1, 0, 3], np.uint8))
    site = site_data(str(path), batch=3, classes=4)
    found, y = whole(site)
    channels = expected[0]
    assert (site.labels, site.classes, site.examples) == (None, 4, 7)
    assert str(site.preparation) == f"pixels/255 channels={channels}"
    assert (found.dtype, found.shape, y.tolist()) == (torch.float32, (7, *expected), [3, 0, 3, 1, 1, 0, 3])
    first = x.transpose(0, 3, 1, 2) if shape == (6, 5, 3) else x.reshape(7, *expected)
    assert torch.equal(found, torch.from_numpy(first.astype(np.float32)) / 255)
    site = site_data(str(path), mean=[0.5] * channels, std=[0.25] * channels)
    assert str(site.preparation).endswith(f" mean={','.join(['0.5'] * channels)} std={','.join(['0.25'] * channels)}")
    assert torch.allclose(whole(site)[0], found * 4 - 2, atol=1e-6)


def test_an_npz_of_vectors_is_taken_as_it_is(tmp_path):
    x = RANDOM.normal(size=(5, 3))
    np.savez(tmp_path / "a.npz", x_train=x, y_train=np.arange(5), x_test=x[:2], y_test=np.arange(2))
    site = site_data(str(tmp_path / "a.npz"))
    assert (site.classes, site.examples) == (None, 5)
    assert torch.equal(whole(site)[0], torch.from_numpy(x).float())
    assert len(whole(site_data(str(tmp_path / "a.npz"), part="test"))[0]) == 2
    scaled = whole(site_data(str(tmp_path / "a.npz"), mean=[1, 2, 3], std=[1, 2, 4]))[0]
    assert torch.allclose(scaled, (torch.from_numpy(x).float() - torch.tensor([1, 2, 3])) / torch.tensor([1, 2, 4]))


def test_names_in_an_npz_are_found_among_the_labels(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=pixels(4, 2, 2), y=np.array([0, 1, 1, 0]), labels=np.array(["dog", "bee"]))
    assert site_data(str(path)).labels == ("dog", "bee")
    site = site_data(str(path), labels=CLASSES)
    assert (site.labels, whole(site)[1].tolist()) == (CLASSES, [3, 1, 1, 3])
    refused(DataError, ["a.npz", "'bee'"], path, labels=["ant", "dog"])
    np.savez(path, x=pixels(4, 2, 2), y=np.array([0, 1, 2, 0]), labels=np.array(["dog", "bee"]))
    for labels in (None, CLASSES):
        refused(DataError, ["a.npz", "example 2 has the label 2", "0..1"], path, labels=labels)


@pytest.mark.parametrize(
    ("arrays", "options", "words"),
    [
        ({"x": pixels(2, 3, 3)}, {}, ["x and y, or x_train and y_train"]),
        ({"x_train": pixels(2, 3, 3), "y_train": np.arange(2)}, {"part": "test"}, ["x_test and y_test"]),
        ({"x": pixels(2, 3, 3), "y": np.arange(3)}, {}, ["2 examples", "3 labels"]),
        ({"x": pixels(2, 3, 3), "y": np.zeros(2)}, {}, ["y is float64"]),
        ({"x": np.zeros((2, 3, 3), int), "y": np.arange(2)}, {}, ["x is int64"]),
        ({"x": pixels(0, 3, 3), "y": np.zeros(0, int)}, {}, ["no examples"]),
        ({"x": pixels(3, 3, 3), "y": np.array([0, 1, 12])}, {"classes": 10}, ["example 2", "label 12", "0..9"]),
        ({"x": pixels(3, 3, 3), "y": np.array([0, -1, 1])}, {}, ["example 1", "label -1", "from 0"]),
        ({"x": np.array([[1.0], [2], [np.nan]]), "y": np.arange(3)}, {"batch": 2}, ["example 2", "not finite"]),
        ({"x": np.array([[1e39]]), "y": np.arange(1)}, {}, ["example 0", "not finite"]),
    ],
)
def test_an_npz_of_another_kind_is_refused(tmp_path, arrays, options, words):
    path = tmp_path / "site.npz"
    np.savez(path, **arrays)
    refused(DataError, [str(path), *words], path, **options)


def test_a_damaged_npz_is_refused(tmp_path):
    path = tmp_path / "site.npz"
    path.write_bytes(b"PK")
    refused(DataError, [str(path), "no complete .npz"], path)


# Known data sets


def test_known_names_are_normalised_as_training_does():
    digits = data.load("digits")
    for part in ("train", "test"):
        site = site_data("digits", part=part)
        ours = list(site.batches())
        theirs = list(evaluate.batches(digits, test=part == "test", size=64))
        again = list(site_data("digits", part=part).batches())
        assert len(ours) == len(theirs) == len(again)
        for one, two, three in zip(ours, theirs, again, strict=True):
            assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(one, two, three, strict=True))
    assert (site.labels, site.classes, site.examples) == (digits.labels, 10, 359)
    assert str(site.preparation) == f"pixels/255 channels=1 mean={digits.mean.item():.8g} std={digits.std.item():.8g}"
    plain, y = whole(site_data("digits", part="test", mean=[0], std=[1]))
    assert torch.equal(plain, digits.x_test.float() / 255)
    turned = site_data("digits", part="test", labels=digits.labels[::-1])
    assert torch.equal(whole(turned)[1], 9 - y)
    refused(UsageError, ["classes is 12", "10 classes"], "digits", classes=12)
    refused(DataError, ["digits", "'9'"], "digits", labels=digits.labels[:9])


# Tables


@pytest.mark.parametrize("separator", [";", "\t"])
def test_cells_may_stand_apart_by_semicolons_or_tabs(tmp_path, separator):
    text = "height,label,weight\n1.5,0,-2\n3,2,1e3\n"
    expected = whole(site_data(str(csv_of(tmp_path / "a.csv", text))))
    found = whole(site_data(str(csv_of(tmp_path / "b.csv", text.replace(",", separator)))))
    assert [part.tolist() for part in found] == [part.tolist() for part in expected]
    decimal = csv_of(tmp_path / "c.csv", "height;label\n1,5;0\n")
    refused(DataError, ["line 2, column 'height' is '1,5'; expected a finite number"], decimal)


def test_a_csv_is_read_line_by_line(tmp_path):
    path = csv_of(tmp_path / "a.csv", "\ufeffheight, label ,weight\n1.5,0,-2\n\n3, 2 ,1e3\n0.5,1.0,7\n")
    site = site_data(str(path), batch=2)
    assert (site.labels, site.classes, site.examples) == (None, None, None)
    assert str(site.preparation).startswith("columns:")
    assert [len(y) for _, y in site.batches()] == [2, 1]
    x, y = whole(site)
    assert (x.dtype, x.tolist(), y.tolist()) == (torch.float32, [[1.5, -2], [3, 1000], [0.5, 7]], [0, 2, 1])
    site = site_data(str(path), mean=[1, 0], std=[0.5, 1000])
    assert str(site.preparation).endswith(" mean=1,0 std=0.5,1000")
    assert torch.allclose(whole(site)[0], torch.tensor([[1, -0.002], [4, 1], [-1, 0.007]]))
    other = whole(site_data(str(csv_of(tmp_path / "b.CSV", "\ufeffkind,a\n2,1\n")), label_column="kind"))
    assert [part.tolist() for part in other] == [[[1.0]], [2]]


def test_a_table_is_read_as_far_as_it_is_walked_through(tmp_path, monkeypatch):
    monkeypatch.setattr(tabular, "_CELLS", 1)
    path = csv_of(tmp_path / "a.csv", "x,label\n" + "1,0\n" * 10 + "1,bad\n")
    batches = site_data(str(path), batch=4).batches()
    assert [len(next(batches)[1]) for _ in range(2)] == [4, 4]
    with pytest.raises(DataError, match="line 12"):
        next(batches)
    path = parquet_of(tmp_path / "a.parquet", x=np.ones(11), label=[*["0"] * 10, "bad"])
    refused(DataError, ["row 11"], path, batch=4)


def test_classes_in_a_table_are_numbers_or_names(tmp_path):
    path = csv_of(tmp_path / "a.csv", "x,label\n1,dog\n2, bee\n3,2\n")
    assert whole(site_data(str(path), labels=CLASSES))[1].tolist() == [3, 1, 2]
    path = csv_of(tmp_path / "a.csv", "x,label\n1,30\n2,10.0\n")
    assert whole(site_data(str(path), labels=["10", "20", "30"]))[1].tolist() == [2, 0]
    refused(DataError, ["line 2, column 'label'", "'30'", "2 classes"], path, labels=["10", "20"])
    refused(DataError, ["label 30", "0..3"], path, labels=CLASSES)
    path = csv_of(tmp_path / "a.csv", "x,label\n1,None\n2,nothing\n")
    refused(DataError, ["line 3", "'nothing'"], path, labels=["None", "some"])


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("", {}, ["is empty"]),
        ("x,label\n", {}, ["no examples"]),
        ("x,label\n1,cat\n", {}, ["line 2, column 'label' is 'cat'", "--labels"]),
        ("x,label\n1,\n", {}, ["line 2, column 'label' is ''"]),
        ("x,label\n1,1.5\n", {}, ["line 2, column 'label' is '1.5'"]),
        ("x,label\n1,1e300\n", {}, ["line 2, column 'label' is '1e300'"]),
        ("x,label\n1,beee\n", {"labels": CLASSES}, ["line 2, column 'label'", "'beee' (did you mean 'bee'?)"]),
        ("x,label\n1,7\n", {"labels": CLASSES}, ["label 7", "0..3"]),
        ("x,label\n1,-7\n", {}, ["label -7"]),
        ("x,y,label\n1,2,0\n1,,0\n", {}, ["line 3, column 'y' is ''", "finite number"]),
        ("x,y,label\n1,2,0\n\ntwo,2,0\n", {}, ["line 4, column 'x' is 'two'"]),
        ("x,y,label\n1,2,0\n1,nan,0\n", {}, ["line 3, column 'y' is 'nan'"]),
        ("x,y,label\n1,2,0\n1,1e40,0\n", {}, ["line 3, column 'y' is '1e40'"]),
        ("x,label\n1,0\n1,0,5\n", {}, ["line 3 has 3 cells; expected 2"]),
        ("x,label\n1,0\n1\n", {}, ["line 3 has 1 cells; expected 2"]),
        ("x,x,label\n1,0,2\n", {}, ["same name: 'x'"]),
        ("label\n1\n", {}, ["no column beside 'label'"]),
        ('x,label\n1,"0\n', {}, ["can't be read as CSV"]),
    ],
)
def test_a_table_of_another_kind_is_refused(tmp_path, text, options, words):
    path = csv_of(tmp_path / "site.csv", text)
    refused(DataError, [str(path), *words], path, **options)


def test_columns_that_are_not_there_are_refused(tmp_path):
    path = csv_of(tmp_path / "site.csv", "x,labels\n1,0\n")
    refused(UsageError, [str(path), "did you mean 'labels'", "x, labels", "--label-column"], path)
    (tmp_path / "site.csv").write_bytes(b"x,label\n\xff,1\n")
    refused(DataError, [str(path), "can't be read as CSV"], path)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    refused(UsageError, ["a.parquet", "pip install pyarrow"], tmp_path / "a.parquet")


def parquet_of(path, **columns):
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(sys.modules["pyarrow"].table(columns), path, row_group_size=4)
    return path


def test_a_parquet_file_is_read_batch_by_batch(tmp_path):
    x = RANDOM.normal(size=10)
    path = parquet_of(tmp_path / "a.parquet", a=x, label=np.arange(10) % 3, b=np.arange(10), c=x > 0)
    site = site_data(str(path), batch=3)
    assert (site.examples, site.classes) == (10, None)
    assert max(len(y) for _, y in site.batches()) <= 3
    found, y = whole(site)
    assert (found.dtype, y.tolist()) == (torch.float32, [row % 3 for row in range(10)])
    assert torch.equal(found, torch.from_numpy(np.stack([x, np.arange(10), x > 0], 1).astype(np.float32)))
    path = parquet_of(tmp_path / "b.parquet", a=x[:3], kind=["dog", "bee", "dog"])
    assert whole(site_data(str(path), label_column="kind", labels=CLASSES))[1].tolist() == [3, 1, 3]
    path = parquet_of(tmp_path / "c.parquet", a=x[:2], label=[True, False])
    assert whole(site_data(str(path)))[1].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"a": ["1", "x"], "label": [0, 1]}, ["row 2, column 'a' is 'x'"]),
        ({"a": [1.0, None], "label": [0, 1]}, ["row 2, column 'a' is", "nan"]),
        ({"a": [1, None], "label": [0, 1]}, ["row 2, column 'a' is", "nan"]),
        ({"a": [True, None], "label": [0, 1]}, ["row 2, column 'a' is None"]),
        ({"a": [1.0, float("inf")], "label": [0, 1]}, ["row 2, column 'a' is", "inf"]),
        ({"a": [[1], [2]], "label": [0, 1]}, ["column 'a' holds list"]),
        ({"a": np.array([1, 2], "datetime64[s]"), "label": [0, 1]}, ["column 'a' holds timestamp"]),
        ({"a": [1, 2], "label": ["x", "y"]}, ["row 1, column 'label' is 'x'", "--labels"]),
        ({"a": [1, 2], "label": [0, None]}, ["row 2, column 'label'"]),
        ({"a": np.zeros(0), "label": np.zeros(0, int)}, ["no examples"]),
    ],
)
def test_a_parquet_file_of_another_kind_is_refused(tmp_path, columns, words):
    path = parquet_of(tmp_path / "site.parquet", **columns)
    refused(DataError, [str(path), *words], path)


def test_damaged_parquet_files_are_refused(tmp_path):
    path = parquet_of(tmp_path / "a.parquet", a=RANDOM.normal(size=100), label=np.arange(100))
    content = path.read_bytes()
    for length in range(0, len(content), 61):
        path.write_bytes(content[:length])
        refused(DataError, [str(path), "can't be read as Parquet"], path)


# Loaders


def own(tmp_path, body):
    path = tmp_path / "mine.py"
    path.write_text(f"import numpy as np\nimport torch\n\n\n{body}\n")
    return f"{path}:give"


def test_a_loader_is_called_for_every_walk(tmp_path):
    spec = own(tmp_path, "calls = []\ndef give(part, *, batch=1, scale=1.0):\n    calls.append(1)\n"
               "    yield torch.full((batch, 2), scale), [0] * batch\n"
               "    yield {'ids': part, 'calls': len(calls)}, np.array([1, 2], np.uint8)\n")  # fmt: skip
    site = site_data(spec, part="test", batch=3, classes=3)
    assert (site.labels, site.classes, site.examples, site.preparation) == (None, 3, None, None)
    for number in (1, 2):
        (x, y), (more, z) = site.batches()
        assert (x.shape, y.tolist(), y.dtype) == ((3, 2), [0, 0, 0], torch.int64)
        assert (more, z.tolist(), z.dtype) == ({"ids": "test", "calls": number}, [1, 2], torch.int64)
    (x, _), _ = site_data(f"{spec}:scale=2:batch=5").batches()
    assert torch.equal(x, torch.full((5, 2), 2.0))


def test_a_data_loader_of_torch(tmp_path):
    spec = own(tmp_path, "from torch.utils.data import DataLoader, TensorDataset\n"
               "def give():\n    return DataLoader(TensorDataset(torch.eye(5), torch.arange(5)), 2)\n")  # fmt: skip
    site = site_data(spec, labels=list("abcde"))
    assert (site.labels, site.classes) == (tuple("abcde"), 5)
    assert torch.equal(whole(site)[0], torch.eye(5))


def test_arrays_of_a_loader_become_tensors(tmp_path):
    spec = own(
        tmp_path, "def give():\n    return [(np.ones((2, 3)), np.arange(2)), (torch.ones(0, 3), torch.arange(0))]"
    )
    ((x, y),) = site_data(spec).batches()
    assert (x.dtype, y.tolist()) == (torch.float32, [0, 1])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return 3", ["returns int", "DataLoader"]),
        ("return []", ["no examples"]),
        ("return [3]", ["batch 0 is int", "(inputs, labels)"]),
        ("return [(1, 2, 3)]", ["batch 0 is tuple of 3"]),
        ("return [None]", ["batch 0 is NoneType"]),
        ("return [(torch.ones(2), torch.ones(2))]", ["labels torch.float32 of shape (2,)", "integers"]),
        ("return [(torch.ones(2), torch.ones(2, 1, dtype=int))]", ["shape (2, 1)"]),
        ("return [(torch.ones(2), torch.ones(2, dtype=bool))]", ["torch.bool"]),
        ("return [(torch.ones(2), ['a', 'b'])]", ["batch 0 can't be made tensors"]),
        ("return [(torch.ones(2), [[1], [2, 3]])]", ["batch 0 can't be made tensors"]),
        ("return [(torch.ones(2), [0, 1]), (torch.ones(3), [0, 1])]", ["batch 1", "shape (3,) and 2 labels"]),
        ("return [(torch.ones(2), [0, 1]), (torch.ones(2), [0, 5])]", ["example 3 has the label 5", "0..2"]),
    ],
)
def test_batches_of_another_kind_are_refused(tmp_path, body, words):
    spec = own(tmp_path, f"def give():\n    {body}")
    refused(DataError, [spec, *words], spec, classes=3)


@pytest.mark.parametrize("body", ["return 1 / 0", "yield torch.ones(1), [0]\n    1 / 0"])
def test_a_loader_that_fails_says_where(tmp_path, body):
    refused(UsageError, ["which fails: ZeroDivisionError", "mine.py, line"], own(tmp_path, f"def give():\n    {body}"))


def test_loaders_that_are_not_there(tmp_path):
    spec = own(tmp_path, "def give():\n    return []")
    refused(UsageError, ["no function 'gave'"], spec.replace("give", "gave"))
    refused(UsageError, ["there is no file"], tmp_path / "other.py:give")
    refused(UsageError, ["unknown option", "'scale'"], f"{spec}:scale=2")


# What can't be meant


def test_other_specs_are_refused(tmp_path):
    refused(UsageError, ["did you mean 'digits'?", "cifar10", ".csv or .parquet", "file.py:function"], "digts")
    refused(UsageError, ["nowhere.csv does not exist"], tmp_path / "nowhere.csv")
    (tmp_path / "a.txt").write_text("")
    refused(UsageError, ["a.txt", ".npz, .csv or .parquet", "digits"], tmp_path / "a.txt")


def test_options_that_cannot_be_meant_are_refused(tmp_path):
    photos(tmp_path / "photos", {"ant": 1, "bee": 1})
    np.savez(tmp_path / "vectors.npz", x=np.ones((2, 3)), y=np.arange(2))
    np.savez(tmp_path / "floats.npz", x=np.ones((2, 3, 3)), y=np.arange(2))
    np.savez(tmp_path / "alpha.npz", x=pixels(2, 3, 3, 4), y=np.arange(2))
    table = csv_of(tmp_path / "a.csv", "x,label\n1,0\n")
    loader = own(tmp_path, "def give():\n    return []")
    normal = {"mean": [0.5], "std": [0.5]}
    for spec, options, words in (
        ("digits", {"part": "valid"}, ["part is 'valid'", "'train' or 'test'"]),
        ("digits", {"batch": 0}, ["batch is 0"]),
        ("digits", {"classes": 1.5}, ["classes is 1.5"]),
        ("digits", {"mean": [0.5]}, ["mean is given alone"]),
        ("digits", {"std": [0.5]}, ["std is given alone"]),
        ("digits", {"labels": "names.txt"}, ["labels is 'names.txt'"]),
        ("digits", {"labels": []}, ["labels is []"]),
        ("digits", {"labels": ["a", "a"]}, ["each of them once"]),
        ("digits", {"mean": [0, 0], "std": [1, 1]}, ["mean has 2 values", "digits has 1 channels"]),
        ("digits", {"mean": [0], "std": [1, 1]}, ["std has 2 values"]),
        ("digits", {"mean": [0], "std": [0]}, ["std is 0", "above 0"]),
        ("digits", {"mean": [float("nan")], "std": [1]}, ["mean is nan", "finite"]),
        ("digits", {"label_column": "y"}, ["label_column is 'y'", "'digits', a known data set", "a .csv file or"]),
        (tmp_path / "photos", normal, ["mean has 1 values", "3 channels", "or --channels 1"]),
        ("digits", {"mean": [0] * 3, "std": [1] * 3}, ["mean has 3 values", "or --channels 3"]),
        (tmp_path / "photos", {"image_size": 0}, ["image_size is 0"]),
        (tmp_path / "vectors.npz", {"image_size": 8}, ["image_size is 8", "vectors.npz holds vectors"]),
        (tmp_path / "vectors.npz", {"channels": 3}, ["channels is 3", "vectors.npz holds vectors"]),
        (tmp_path / "floats.npz", {"crop": 2}, ["crop is 2", "floats.npz holds torch.float32", "uint8"]),
        (tmp_path / "alpha.npz", {"resize": 8}, ["resize is 8", "4 channels", "--channels 3"]),
        (table, {"image_size": 8}, ["image_size is 8", "a .csv file"]),
        (table, {"mean": [1, 2], "std": [1, 2]}, ["mean has 2 values", "1 channels or features"]),
        (loader, normal, ["mean is (0.5,)", "a loader"]),
        (loader, {"numbers": "values"}, ["numbers is 'values'", "a loader"]),
        (loader, {"skip_damaged": True}, ["skip_damaged is True", "only a folder takes it"]),
        (table, {"crop": 8}, ["crop is 8", "a .csv file", "only a folder or"]),
        (table, {"channels": 3}, ["channels is 3", "a .csv file"]),
    ):
        refused(UsageError, words, spec, **options)


def test_labels_are_read_a_line_each(tmp_path):
    path = tmp_path / "names.txt"
    path.write_text("\ufeffant\n\n  red bee \r\ncow", encoding="utf-8")
    assert read_labels(path) == read_labels(str(path)) == ("ant", "red bee", "cow")
    for content, word in (
        (b"a\nb\na\n", "more than once: a"),
        (b"\n \n", "names no class"),
        (b"\xff", "not a text in UTF-8"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=word) as error:
            read_labels(path)
        assert str(path) in str(error.value)
    path.unlink()
    with pytest.raises(DataError, match=r"names\.txt: there is no such file"):
        read_labels(path)
