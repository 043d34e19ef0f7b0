"""The images of a site: folders, damaged files, how they are prepared, and that they stream."""

import _thread
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.site_files import CLASSES, csv_of, photos, pixels, put, refused, site_data, whole
from unskew.data import datasets as data, images, own_files, sites
from unskew.data.preparation import Preparation
from unskew.errors import DataError, UsageError

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
    theirs = own_files.class_folders(tmp_path, size=4)
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
    assert list(site.damaged) == [str(tmp_path / name) for name in names]
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
    refused(DataError, ["deep.png has more than 8 bits", "a function of your own"], tmp_path, skip_damaged=True)
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


@pytest.mark.parametrize("channels", [None, 1, 3, 4])
def test_images_in_arrays_are_prepared_as_those_in_files(tmp_path, channels):
    x = pixels(5, 7, 9, channels) if channels else pixels(5, 7, 9)
    for number, image in enumerate(x):
        put(tmp_path / "photos" / str(number) / "a.png", image[..., 0] if channels == 1 else image)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(5))
    function = by_function(tmp_path, TRANSFORM)
    for preparation in (
        Preparation(resize=6, crop=5, interpolation="bicubic", channels=3, mean=(0.1,) * 3, std=(0.2,) * 3),
        Preparation(image_size=12, channels=1),
        Preparation(crop=8, offset="floor", channels=3),
        function,
    ):
        files, arrays = (
            sites.site_data(str(tmp_path / name), preparation=preparation, batch=2) for name in ("photos", "a.npz")
        )
        assert torch.equal(whole(files)[0], whole(arrays)[0])
        assert files.preparation == arrays.preparation
        assert whole(arrays)[1].tolist() == list(range(5))


def test_known_data_sets_are_prepared_too(tmp_path, monkeypatch):
    plain, site = site_data("digits", mean=[0], std=[1]), site_data("digits", image_size=12, interpolation="box")
    image = Image.fromarray((whole(plain)[0][7, 0] * 255).to(torch.uint8).numpy()).resize(
        (12, 12), Image.Resampling.BOX
    )
    mean, std = data.load("digits").mean, data.load("digits").std
    assert torch.allclose(whole(site)[0][7], (torch.from_numpy(np.array(image)) / 255 - mean) / std, atol=1e-6)
    assert str(site.preparation).startswith("pixels/255 image_size=12 interpolation=box channels=1 mean=0.305")
    made = sites.site_data("digits", preparation=by_function(tmp_path, TRANSFORM))
    assert whole(made)[0].shape == (1438, 3, 3, 2)
    sizes = []
    toy = data.dataset("toy", torch.zeros(2, 1, 4, 4), torch.arange(2), torch.zeros(2, 1, 4, 4), torch.arange(2))
    monkeypatch.setattr(sites, "load", lambda name, size: sizes.append((name, size)) or toy)
    for name, options in (("cinic10", {}), ("tiny-imagenet", {"interpolation": "box"}), ("cifar10", {})):
        refused(UsageError, ["only bytes"], name, image_size=4, **options)  # the toy has none
    assert sizes == [("cinic10", 4), ("tiny-imagenet", None), ("cifar10", None)]


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
        (UsageError, "return torch.tensor([1.0, float('nan')])", ["values that are not finite"]),
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
    table = str(csv_of(tmp_path / "a.csv", "x,label\n1,0\n"))
    with pytest.raises(UsageError, match="function is 'prep.py:transform', but data is .*, a .csv file"):
        sites.site_data(table, preparation=preparation)


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
