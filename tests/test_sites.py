"""A site's data as batches: each kind of input, sites that lack classes, what is refused, and that it streams."""

import _thread
import signal
import sys
import threading
import time
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from PIL import Image

from unskew import data, evaluate, images, readers, sites, tabular
from unskew.errors import DataError, UsageError
from unskew.preparation import Preparation
from unskew.sites import read_labels

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


def whole(site):
    x, y = zip(*site.batches(), strict=True)
    return torch.cat(x), torch.cat(y)


def refused(kind, words, spec, **options):
    with pytest.raises(kind) as error:
        list(site_data(str(spec), **options).batches())
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"{missing} not in: {error.value}"


# Folders


def test_all_images_of_a_folder_are_the_sites(tmp_path):
    images = photos(tmp_path, {"bee": 5, "ant": 4})
    (tmp_path / "ant" / "notes.txt").write_text("")
    (tmp_path / "ant" / "._0.png").write_bytes(b"what some systems leave behind")
    (tmp_path / ".cache").mkdir()
    site = site_data(str(tmp_path), batch=4)
    assert (site.labels, site.classes, site.examples) == (("ant", "bee"), 2, 9)
    assert str(site.preparation) == "pixels/255 channels=3"
    assert [len(y) for _, y in site.batches()] == [4, 4, 1]
    x, y = whole(site)
    assert y.tolist() == [0] * 4 + [1] * 5
    assert (x.dtype, y.dtype, x.shape) == (torch.float32, torch.int64, (9, 3, 6, 5))
    expected = np.stack([images[name] for name in sorted(images)]).transpose(0, 3, 1, 2)
    assert torch.equal(x, torch.from_numpy(expected.astype(np.float32)) / 255)
    assert x.is_contiguous()
    again = whole(site)
    assert torch.equal(again[0], x)
    assert torch.equal(again[1], y)


def test_classes_go_by_name_where_a_site_lacks_some(tmp_path):
    photos(tmp_path, {"dog": 2, "bee": 1})
    site = site_data(str(tmp_path), labels=CLASSES)
    assert whole(site)[1].tolist() == [1, 3, 3]
    assert (site.labels, site.classes) == (CLASSES, 4)
    assert whole(site_data(str(tmp_path), labels=CLASSES[::-1], classes=4))[1].tolist() == [2, 0, 0]
    assert whole(site_data(str(tmp_path)))[1].tolist() == [0, 1, 1]
    refused(UsageError, ["classes is 4", "2 classes", "--labels"], tmp_path, classes=4)
    refused(UsageError, ["classes is 3", "4 labels"], tmp_path, classes=3, labels=CLASSES)
    photos(tmp_path, {"beee": 1, "xyzzy": 1})
    refused(DataError, ["'beee' (did you mean 'bee'?), 'xyzzy'", "4 classes"], tmp_path, labels=CLASSES)


def test_one_class_alone_needs_the_names_of_all(tmp_path):
    refused(DataError, [str(tmp_path), "0 class folders"], tmp_path)
    photos(tmp_path, {"cow": 3})
    refused(DataError, [str(tmp_path), "1 class folders", "--labels"], tmp_path)
    assert whole(site_data(str(tmp_path), labels=CLASSES))[1].tolist() == [2] * 3
    (tmp_path / "ant").mkdir()  # an empty folder names a class that the site lacks
    assert whole(site_data(str(tmp_path)))[1].tolist() == [1] * 3
    for file in (tmp_path / "cow").iterdir():
        file.unlink()
    refused(DataError, [str(tmp_path), "no examples"], tmp_path)


@pytest.mark.parametrize("name", ["test", "val", "valid", "validation"])
def test_the_part_chooses_where_a_folder_is_split(tmp_path, name):
    photos(tmp_path / "train", {"ant": 2, "bee": 3, "cow": 1})
    photos(tmp_path / name, {"cow": 2})
    assert whole(site_data(str(tmp_path)))[1].tolist() == [0, 0, 1, 1, 1, 2]
    assert whole(site_data(str(tmp_path), part="test"))[1].tolist() == [2, 2]  # numbered as in training
    photos(tmp_path / name, {"cat": 2})
    refused(DataError, [name, "'cat'", "3 classes"], tmp_path, part="test")


def test_grey_stays_grey_only_if_all_are(tmp_path):
    images = photos(tmp_path, {"ant": 2, "bee": 2}, shape=(4, 4))
    grey, _ = whole(site_data(str(tmp_path)))
    assert grey.shape == (4, 1, 4, 4)
    assert torch.equal(grey[3, 0], torch.from_numpy(images["bee/1.png"].astype(np.float32)) / 255)
    colour, _ = whole(site_data(str(tmp_path), mean=[0.5, 0, 0], std=[0.5, 1, 2]))
    assert torch.allclose(colour, torch.cat([grey * 2 - 1, grey, grey / 2], 1), atol=1e-6)
    put(tmp_path / "bee" / "2.png", pixels(4, 4, 3))
    mixed, _ = whole(site_data(str(tmp_path), batch=2))
    assert mixed.shape == (5, 3, 4, 4)
    assert torch.equal(mixed[:4], grey.expand(4, 3, 4, 4))


def test_headers_alone_say_whether_all_are_grey(tmp_path, monkeypatch):
    photos(tmp_path, {"ant": 3, "bee": 3}, shape=(4, 4))
    monkeypatch.setattr(images, "picture", lambda *_: pytest.fail("an image was decoded"))
    assert site_data(str(tmp_path)).examples == 6


def test_images_are_scaled_as_the_other_readers_do(tmp_path):
    photos(tmp_path, {"ant": 5, "bee": 1})
    put(tmp_path / "bee" / "odd.png", pixels(9, 7, 3))
    site = site_data(str(tmp_path), image_size=4)
    theirs = readers.class_folders(tmp_path, size=4)
    expected = np.concatenate([theirs.x, theirs.x_test]).transpose(0, 3, 1, 2).astype(np.float32) / 255
    assert str(site.preparation) == "pixels/255 image_size=4 channels=3"
    assert sorted(whole(site)[0].flatten(1).tolist()) == sorted(expected.reshape(7, -1).tolist())
    refused(DataError, ["odd.png is 7x9", "0.png is 5x6", "--image-size"], tmp_path, batch=2)


def test_images_that_cannot_be_read_are_refused(tmp_path):
    photos(tmp_path, {"ant": 2, "bee": 2})
    (tmp_path / "bee" / "1.png").write_bytes((tmp_path / "bee" / "0.png").read_bytes()[:60])
    refused(DataError, ["bee", "1.png can't be read as an image"], tmp_path)
    (tmp_path / "bee" / "1.png").write_bytes(b"")
    refused(DataError, ["1.png can't be read as an image"], tmp_path)
    put(tmp_path / "bee" / "1.png", np.zeros((6, 5), np.uint16))
    refused(DataError, ["1.png has more than 8 bits"], tmp_path)


def test_numbers_as_names_are_in_the_order_of_numbers(tmp_path):
    photos(tmp_path, {str(number): 1 for number in range(12)})
    site = site_data(str(tmp_path))
    assert site.labels == tuple(map(str, range(12)))
    assert site.assumed
    assert whole(site)[1].tolist() == list(range(12))
    names = sorted(site.labels)  # as a model that was trained with torchvision's ImageFolder has them
    given = site_data(str(tmp_path), labels=names)
    assert not given.assumed
    assert whole(given)[1].tolist() == [names.index(str(number)) for number in range(12)]
    photos(tmp_path, {"01": 1})
    refused(DataError, [str(tmp_path), "classes '01' and '1' are the same number"], tmp_path)


def test_what_is_left_out_is_counted_and_named(tmp_path):
    photos(tmp_path / "train", {"ant": 2, "bee": 1})
    photos(tmp_path / "test", {"ant": 1, "bee": 1})
    assert site_data(str(tmp_path)).left_out == ()
    photos(tmp_path / "train" / "ant", {"more": 3})
    for name in ("ant/notes.txt", "bee/0.heic", "bee/1.heic", "bee/.hidden", "readme.md"):
        (tmp_path / "train" / name).write_text("")
    put(tmp_path / "train" / "stray.JPG", pixels(3, 3, 3))
    photos(tmp_path / "valid", {"ant": 1})
    site = site_data(str(tmp_path))
    assert site.examples == len(whole(site)[1]) == 3
    assert list(map(str, site.left_out)) == [
        "3 files that are no images (ant/notes.txt, bee/0.heic, bee/1.heic)",
        "1 folders inside class folders (ant/more)",
        "1 images beside the class folders (stray.JPG)",
        "1 folders beside train/ and test/ (valid)",
    ]
    assert [some.count for some in site_data(str(tmp_path), part="test").left_out] == [1]
    for number in range(30):
        (tmp_path / "train" / "ant" / f"{number:02}.raw").write_text("")
    (other, *_) = site_data(str(tmp_path)).left_out
    assert str(other) == "33 files that are no images (ant/00.raw, ant/01.raw, ant/02.raw, ant/03.raw, ant/04.raw, ...)"


def test_who_finds_nothing_is_told_what_was_left_out(tmp_path):
    photos(tmp_path / "train", {"ant": 2, "bee": 1})  # and nothing to test with: `train` is taken for a class
    refused(DataError, ["holds 1 class folders", "2 folders inside class folders (train/ant, train/bee)"], tmp_path)
    photos(tmp_path, {"more/bee": 1})
    refused(DataError, ["holds no examples", "left out are 3 folders inside class folders"], tmp_path)
    flat = tmp_path / "flat"
    put(flat / "0.png", pixels(3, 3))
    refused(DataError, ["holds 0 class folders", "1 images beside the class folders (0.png)"], flat)


def test_a_folder_that_may_not_be_read_is_refused(tmp_path, monkeypatch):
    photos(tmp_path, {"ant": 1, "bee": 1})
    plain = images.os.scandir

    def forbid(path):
        if path.name == "bee":
            raise PermissionError(13, "Permission denied")
        return plain(path)

    monkeypatch.setattr(images.os, "scandir", forbid)
    refused(DataError, [str(tmp_path / "bee"), "can't be read: Permission denied"], tmp_path)


# Damaged images


def damage(root, *names):
    """Cut image files short."""
    for name in names:
        content = (root / name).read_bytes()
        (root / name).write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("options", [{}, {"channels": 3}])
def test_a_damaged_image_stops_a_site_unless_it_may_be_skipped(tmp_path, options):
    made = photos(tmp_path, {"ant": 5, "bee": 6}, shape=(9, 8, 3))
    names = ("ant/1.png", "bee/0.png", "bee/1.png", "bee/5.png")
    damage(tmp_path, *names[:-1])
    (tmp_path / names[-1]).write_bytes(b"")
    words = ["ant/1.png can't be read as an image", "--skip-damaged (skip_damaged=True)"]
    refused(DataError, words, tmp_path, **options)
    site = site_data(str(tmp_path), batch=2, skip_damaged=True, **options)
    found = [(x, y) for x, y in site.batches()]
    assert [len(y) for _, y in found] == [1, 2, 1, 1, 2]
    assert torch.cat([y for _, y in found]).tolist() == [0] * 4 + [1] * 3
    left = [made[name] for name in sorted(made) if name not in names]
    assert torch.equal(torch.cat([x for x, _ in found]), torch.from_numpy(np.stack(left).transpose(0, 3, 1, 2)) / 255)
    assert sorted(site.damaged) == sorted(str(tmp_path / name) for name in names)
    assert all("can't be read as an image" in why for why in site.damaged.values())
    assert site.examples == 11
    whole(site)  # a second walk counts no file twice
    assert len(site.damaged) == 4


def test_damaged_images_are_counted_while_walking(tmp_path):
    photos(tmp_path, {"ant": 4, "bee": 4})
    damage(tmp_path, "ant/0.png", "bee/3.png")
    site = site_data(str(tmp_path), batch=4, channels=3, skip_damaged=True)
    assert not site.damaged
    walk = site.batches()
    next(walk)
    assert len(site.damaged) == 1
    next(walk)
    assert len(site.damaged) == 2


def test_a_site_of_damaged_images_alone_is_refused(tmp_path):
    photos(tmp_path, {"ant": 2, "bee": 1})
    damage(tmp_path, "ant/0.png", "ant/1.png", "bee/0.png")
    refused(DataError, ["none of its 3 images can be read", "0.png"], tmp_path, skip_damaged=True)
    refused(DataError, ["none of its 3 images can be read"], tmp_path, skip_damaged=True, batch=1, channels=1)


def test_what_is_whole_but_not_taken_is_not_skipped_as_damaged(tmp_path):
    photos(tmp_path, {"ant": 2, "bee": 1})
    put(tmp_path / "ant" / "deep.png", np.zeros((6, 5), np.uint16))
    refused(DataError, ["deep.png has more than 8 bits"], tmp_path, skip_damaged=True)
    put(tmp_path / "ant" / "deep.png", pixels(9, 9, 3))
    refused(DataError, ["deep.png is 9x9"], tmp_path, skip_damaged=True)


# Preparation


def test_sides_are_scaled_and_the_middle_cut_out(tmp_path):
    photos(tmp_path, {"ant": 2}, shape=(30, 41, 3))
    photos(tmp_path, {"bee": 2}, shape=(50, 21))
    options = {"resize": 16, "interpolation": "bicubic", "mean": [0.5] * 3, "std": [0.25] * 3}
    site = site_data(str(tmp_path), crop=12, **options)
    told = "pixels/255 resize=16 crop=12 interpolation=bicubic channels=3 mean=0.5,0.5,0.5 std=0.25,0.25,0.25"
    assert str(site.preparation) == told
    expected = []
    for name, size, corner in (("ant/0", (21, 16), (4, 2)), ("bee/1", (16, 38), (2, 13))):
        image = Image.open(tmp_path / f"{name}.png").convert("RGB").resize(size, Image.Resampling.BICUBIC)
        expected.append(np.asarray(image.crop((*corner, corner[0] + 12, corner[1] + 12))).transpose(2, 0, 1))
    x = whole(site)[0][[0, 3]]
    assert torch.allclose(x, (torch.from_numpy(np.stack(expected)) / 255 - 0.5) / 0.25, atol=1e-6)
    refused(DataError, ["0.png is 16x38", "0.png is 21x16", "shorter side is 16", "--crop"], tmp_path, **options)


def test_channels_are_those_that_are_asked_for(tmp_path):
    images_of = photos(tmp_path, {"ant": 1}, shape=(4, 4)) | photos(tmp_path, {"bee": 1}, shape=(4, 4, 3))
    grey = np.stack([images_of["ant/0.png"], np.asarray(Image.fromarray(images_of["bee/0.png"]).convert("L"))])
    site = site_data(str(tmp_path), channels=1, mean=[0.5], std=[1])
    assert torch.allclose(whole(site)[0], torch.from_numpy(grey)[:, None] / 255 - 0.5)
    (tmp_path / "bee" / "0.png").unlink()
    colour = whole(site_data(str(tmp_path), channels=3))[0]
    assert torch.equal(colour, torch.from_numpy(grey[:1])[:, None].expand(1, 3, 4, 4) / 255)
    refused(UsageError, ["mean has 1 values, but channels is 3"], tmp_path, channels=3, mean=[0], std=[1])


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_channels_of_arrays_are_made_as_those_of_files(tmp_path, kind):
    x = pixels(3, 5, 4, 4)  # with alpha
    path = str(tmp_path / "a.npz")
    np.savez(path, x=x.astype(kind), y=np.arange(3))
    scale = 255 if kind == np.uint8 else 1
    colour, grey = (torch.from_numpy(np.stack([np.asarray(Image.fromarray(one).convert("RGB").convert(mode))
                    for one in x])).float() / scale for mode in ("RGB", "L"))  # fmt: skip
    site = site_data(path, channels=3)
    assert torch.equal(whole(site)[0], colour.permute(0, 3, 1, 2))
    assert str(site.preparation) == f"{'pixels/255' if kind == np.uint8 else 'values'} channels=3"
    found = whole(site_data(path, channels=1))[0][:, 0]
    assert torch.equal(found, grey) if kind == np.uint8 else torch.allclose(found, grey, atol=0.51)
    np.savez(path, x=x[..., :1].astype(kind), y=np.arange(3))
    assert torch.equal(whole(site_data(path, channels=3))[0][:, 2], torch.from_numpy(x[..., 0]).float() / scale)
    np.savez(path, x=np.ones((3, 2)), y=np.arange(3))
    refused(UsageError, ["channels is 3", "vectors"], path, channels=3)


def test_a_known_data_set_in_colour_has_its_own_mean_for_each(tmp_path, monkeypatch):
    grey, site = whole(site_data("digits"))[0], site_data("digits", channels=3)
    assert torch.equal(whole(site)[0], grey.expand(-1, 3, -1, -1))
    assert len(site.preparation.mean) == 3
    x = torch.from_numpy(pixels(4, 3, 2, 2))
    toy = data.dataset("toy", x, torch.arange(4), x, torch.arange(4))
    monkeypatch.setattr(sites, "load", lambda *_, **__: toy)
    assert whole(site_data("digits"))[0].shape == (4, 3, 2, 2)
    refused(UsageError, ["channels is 1", "give mean and std"], "digits", channels=1)
    assert whole(site_data("digits", channels=1, mean=[0], std=[1]))[0].shape == (4, 1, 2, 2)


def test_a_preparation_of_other_data_is_refused(tmp_path):
    photos(tmp_path, {"ant": 1, "bee": 1})
    site = site_data(str(tmp_path), image_size=4)
    again = sites.site_data(str(tmp_path), preparation=Preparation.parse(str(site.preparation)))
    assert torch.equal(whole(again)[0], whole(site)[0])
    assert again.preparation == site.preparation
    refused(DataError, ["holds pixels/255", "is of values"], tmp_path, numbers="values")
    table = csv_of(tmp_path / "a.csv", "x,label\n1,0\n")
    refused(DataError, ["holds columns:", "is of columns:01234567"], table, numbers="columns:01234567")


TRANSFORM = """
def transform(image):
    assert image.mode == "RGB"
    return torch.from_numpy(np.array(image.resize((2, 3)))).permute(2, 0, 1).double() / 100
"""


def by_function(tmp_path, body, name="transform"):
    path = tmp_path / "prep.py"
    path.write_text(f"import numpy as np\nimport torch\n{body}")
    return Preparation.of_function(f"{path}:{name}")


def test_a_function_of_the_users_prepares_images(tmp_path):
    root = tmp_path / "photos"
    made = photos(root, {"ant": 2}, shape=(6, 5)) | photos(root, {"bee": 12}, shape=(9, 9, 3))
    put(root / "bee" / "broken.png", pixels(3, 3))
    damage(root, "bee/broken.png")
    preparation = by_function(tmp_path, TRANSFORM)
    site = sites.site_data(str(root), preparation=preparation, skip_damaged=True, batch=5)
    x, y = whole(site)
    assert (x.dtype, x.shape, y.tolist()) == (torch.float32, (14, 3, 3, 2), [0] * 2 + [1] * 12)
    assert list(site.damaged) == [str(root / "bee" / "broken.png")]
    expected = np.asarray(Image.fromarray(made["bee/0.png"]).resize((2, 3))).transpose(2, 0, 1)
    assert torch.equal(x[2], torch.from_numpy(expected / 100).float())
    assert str(site.preparation) == f"channels=3 function=prep.py:transform digest={preparation.digest}"
    grey = by_function(tmp_path, "def transform(image):\n    return torch.ones(4) * len(image.mode)")
    assert whole(sites.site_data(str(root), preparation=replace(grey, channels=1), skip_damaged=True))[0].max() == 1


def test_functions_get_images_of_more_than_8_bits_as_they_are(tmp_path):
    for number, value in enumerate((300, 60000)):
        put(tmp_path / str(number) / "a.png", np.full((2, 2), value, np.uint16))
    preparation = by_function(tmp_path, "def transform(image):\n    return torch.tensor([np.asarray(image).max() / 1])")
    assert whole(sites.site_data(str(tmp_path), preparation=preparation))[0].tolist() == [[300.0], [60000.0]]


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        (UsageError, "return image", ["prep.py:transform", "makes Image of", "0.png", "a tensor of floating point"]),
        (UsageError, "return torch.zeros(3, dtype=torch.uint8)", ["makes torch.uint8 of", "ToTensor"]),
        (UsageError, "return torch.tensor([1.0, float('nan')])", ["some not finite"]),
        (UsageError, "return image.nothing", ["0.png", "which fails: AttributeError", "prep.py, line 4"]),
        (UsageError, "return torch.rand(3)", ["makes something else of", "0.png", "leave out what is random"]),
        (DataError, "return torch.zeros(image.size)", ["makes (7, 8) of", "0.png", "but (5, 6) of", "one shape"]),
    ],
)
def test_functions_that_do_something_else_are_refused(tmp_path, kind, body, words):
    photos(tmp_path / "photos", {"ant": 20})
    photos(tmp_path / "photos", {"bee": 1}, shape=(8, 7, 3))
    preparation = by_function(tmp_path, f"def transform(image):\n    {body}\n")
    with pytest.raises(kind) as error:
        whole(sites.site_data(str(tmp_path / "photos"), preparation=preparation))
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"{missing} not in: {error.value}"


def test_functions_that_are_not_there_are_refused(tmp_path):
    photos(tmp_path / "photos", {"ant": 1, "bee": 1})
    preparation = by_function(tmp_path, TRANSFORM)
    for other, word in (
        (Preparation.parse(str(preparation)), "whose file is not known here"),
        (replace(preparation, digest="0" * 16), "is another file than its digest says"),
        (by_function(tmp_path, TRANSFORM, "nothing"), "has no function 'nothing'"),
    ):
        with pytest.raises(UsageError, match=word):
            sites.site_data(str(tmp_path / "photos"), preparation=other)
    with pytest.raises(UsageError, match="function is 'prep.py:transform', but data is 'digits'"):
        sites.site_data("digits", preparation=preparation)


# Streaming


class Gate:
    """A decoder that counts, and can be interrupted."""

    def __init__(self, monkeypatch):
        self.decoded, self.threads, self.plain = [], set(), images.picture
        self.interrupt, self.one_at_a_time = 0, threading.Lock()
        monkeypatch.setattr(images, "picture", self)

    def __call__(self, read, name, channels):
        with self.one_at_a_time:
            self.decoded.append(name)
            due = len(self.decoded) == self.interrupt
        self.threads.add(threading.get_ident())
        if due:
            _thread.interrupt_main()  # as Ctrl-C does
        time.sleep(0.001)
        return self.plain(read, name, channels)


def check_threads_end(before):
    """Threads may be on their way out where an interrupt came, but not longer."""
    until = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_batch_is_decoded_when_it_is_asked_for(tmp_path, monkeypatch):
    photos(tmp_path, {"ant": 50, "bee": 50}, shape=(3, 3, 3))
    gate = Gate(monkeypatch)
    batches = site_data(str(tmp_path), batch=4).batches()
    assert not gate.decoded
    for number in range(1, 6):
        next(batches)
        assert len(gate.decoded) == 4 * number
    assert threading.get_ident() not in gate.threads
    assert len(list(batches)) == 20
    assert len(gate.decoded) == 100


def test_who_leaves_early_leaves_no_thread(tmp_path, monkeypatch):
    photos(tmp_path, {"ant": 100, "bee": 100}, shape=(3, 3, 3))
    site = site_data(str(tmp_path), batch=200)
    gate = Gate(monkeypatch)
    before = threading.active_count()
    batches = site_data(str(tmp_path), batch=4).batches()
    next(batches)  # held, not closed
    check_threads_end(before)
    gate.interrupt = len(gate.decoded) + 5
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            next(site.batches())
    finally:
        signal.signal(signal.SIGINT, handler)
    check_threads_end(before)
    assert len(gate.decoded) < 150
    assert len(whole(site)[0]) == 200


def test_a_failure_ends_the_threads_too(tmp_path):
    photos(tmp_path, {"ant": 20, "bee": 20}, shape=(3, 3, 3))
    (tmp_path / "bee" / "11.png").write_bytes(b"")
    before = threading.active_count()
    refused(DataError, ["11.png"], tmp_path, batch=4)
    check_threads_end(before)


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
    refused(UsageError, ["size=12"], "digits", image_size=12)


# Tables


def csv_of(path, text):
    path.write_text(text, encoding="utf-8")
    return path


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
    np.savez(tmp_path / "a.npz", x=pixels(2, 3, 3), y=np.arange(2))
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
        (tmp_path / "photos", normal, ["mean has 1 values", "3 channels"]),
        (tmp_path / "photos", {"image_size": 0}, ["image_size is 0"]),
        (tmp_path / "a.npz", {"image_size": 8}, ["image_size is 8", "a .npz file", "only a folder or"]),
        (table, {"image_size": 8}, ["image_size is 8", "a .csv file"]),
        (table, {"mean": [1, 2], "std": [1, 2]}, ["mean has 2 values", "1 channels or features"]),
        (loader, normal, ["mean is (0.5,)", "a loader"]),
        (loader, {"numbers": "values"}, ["numbers is 'values'", "a loader"]),
        (loader, {"skip_damaged": True}, ["skip_damaged is True", "only a folder takes it"]),
        (tmp_path / "a.npz", {"resize": 8}, ["resize is 8", "only a folder takes it"]),
        ("digits", {"crop": 8}, ["crop is 8", "only a folder takes it"]),
        ("digits", {"image_size": 8, "interpolation": "box"}, ["interpolation is 'box'", "only a folder takes it"]),
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
        (b"\xff", "can't be read"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=word) as error:
            read_labels(path)
        assert str(path) in str(error.value)
    path.unlink()
    with pytest.raises(DataError, match="names.txt can't be read"):
        read_labels(path)
