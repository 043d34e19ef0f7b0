"""The preparation of inputs as a value: it travels as text and comes back, says where it differs, and is a module."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from unskew.data.datasets import normalise
from unskew.data.preparation import INTERPOLATIONS, MOST, OFFSETS, Preparation, as_module
from unskew.errors import DataError, UsageError

SIDES = st.integers(1, MOST)
DIGESTS = st.text("0123456789abcdef", min_size=16, max_size=16)
FILES = st.text(min_size=1).filter(lambda name: "/" not in name)
MEANS = st.floats(-1e30, 1e30, width=64)
DEVIATIONS = st.floats(1e-30, 1e30)


@st.composite
def preparations(draw):
    channels = draw(st.sampled_from([None, 1, 3]))
    if draw(st.booleans()):
        function = f"{draw(FILES)}:{draw(st.sampled_from(['transform', 'f_1', 'größe']))}"
        return Preparation(function=function, digest=draw(DIGESTS), channels=channels)
    options = {"channels": channels}
    options["numbers"] = draw(st.sampled_from([None, "pixels/255", "values", "columns:01234567"]))
    if side := draw(st.sampled_from([None, "image_size", "resize"])):
        options |= {side: draw(SIDES), "interpolation": draw(st.sampled_from(list(INTERPOLATIONS)))}
    if draw(st.booleans()):
        options |= {"crop": draw(SIDES), "offset": draw(st.sampled_from(OFFSETS))}
    if draw(st.booleans()):
        width = channels or draw(st.integers(1, 5))
        options["mean"] = draw(st.tuples(*[MEANS] * width))
        options["std"] = draw(st.tuples(*[DEVIATIONS] * width))
    return Preparation(**options)


@settings(deadline=None)
@given(preparations())
def test_what_is_written_comes_back(preparation):
    text = str(preparation)
    assert Preparation.parse(text) == preparation
    assert text.isascii()
    assert text.isprintable()
    assert str(Preparation.parse(text)) == text
    assert preparation.difference(Preparation.parse(text)) == ""


@settings(deadline=None)
@given(preparations(), preparations())
def test_other_preparations_have_other_texts_and_differ_in_words(one, two):
    assert (one == two) == (str(one) == str(two)) == (one.difference(two) == "")


@settings(deadline=None)
@given(MEANS, DEVIATIONS)
def test_numbers_keep_the_digits_that_are_computed_with(mean, deviation):
    made = Preparation(mean=(mean,), std=(deviation,))
    for kept, value in ((made.mean[0], mean), (made.std[0], deviation)):
        assert torch.tensor(kept, dtype=torch.float32) == torch.tensor(value, dtype=torch.float32)


def test_texts_are_short_and_say_only_what_is_done():
    photo = Preparation("pixels/255", resize=256, crop=224, channels=3, mean=(0.485,) * 3, std=(0.229,) * 3)
    assert str(photo) == ("pixels/255 resize=256 crop=224 channels=3 mean=0.485,0.485,0.485 std=0.229,0.229,0.229")
    assert (
        str(Preparation("values", mean=(torch.tensor(0.1).item(), 2), std=(1, 1e-9))) == "values mean=0.1,2 std=1,1e-09"
    )
    assert str(Preparation()) == ""
    assert str(Preparation(function="my prep.py:f", digest="0" * 16)) == f"function=my%20prep.py:f digest={'0' * 16}"


def test_whole_numbers_and_lists_may_come_in_any_type():
    made = Preparation(image_size=32.0, channels=np.int64(1), mean=[np.float32(0.1)], std=(1,))
    assert made == Preparation(image_size=32, channels=1, mean=(0.1,), std=(1.0,))
    assert str(made) == "image_size=32 channels=1 mean=0.1 std=1"
    for options, word in (({"mean": 0.5, "std": 0.5}, "mean is 0.5: give a list"), ({"crop": 1.5}, "crop is 1.5"),
                          ({"channels": "3"}, "channels is '3'"), ({"resize": True}, "resize is bool")):  # fmt: skip
        with pytest.raises(UsageError, match=word):
            Preparation(**options)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("pixels", "numbers is 'pixels'"),
        ("pixels/255 values", "'values' is unknown"),
        ("pixels/255  channels=3", "'' is unknown"),
        (" pixels/255", "'pixels/255' is unknown"),
        ("size=3", "'size' is unknown"),
        ("path=prep.py", "'path' is unknown"),
        ("numbers=values", "'numbers' is unknown"),
        ("image_size=0", "image_size is 0"),
        ("image_size=4.0", "invalid literal"),
        ("image_size=70000", "1..65535"),
        ("image_size=04", "would write it as 'image_size=4'"),
        ("image_size=4 image_size=4", "would write it as"),
        ("crop=4 image_size=4", "would write it as 'image_size=4 crop=4'"),
        ("interpolation=bilinear", "would write it as"),
        ("image_size=4 interpolation=cubic", "did you mean 'bicubic'?"),
        ("interpolation=bicubic", "nothing is scaled"),
        ("offset=floor", "nothing is cut out"),
        ("crop=4 offset=ceil", "unknown offset 'ceil'"),
        ("image_size=4 resize=4", "choose one"),
        ("channels=2", "channels is 2"),
        ("mean=0.5", "mean is given alone"),
        ("mean=0.5 std=0.5,1", "mean has 1 values, std has 2 values"),
        ("mean= std=", "could not convert"),
        ("mean=nan std=1", "mean is nan"),
        ("mean=0 std=inf", "std is inf"),
        ("mean=0 std=0", "std is 0"),
        ("mean=0 std=-1", "std is -1"),
        ("mean=0.50 std=1", "would write it as 'mean=0.5 std=1'"),
        ("channels=3 mean=0.5 std=1", "mean has 1 values, but channels is 3"),
        ("function=prep.py:f", "digest is None"),
        (f"digest={'0' * 16}", "function is None"),
        (f"function=a%2Fprep.py:f digest={'0' * 16}", "without folders"),
        (f"function=prep.py digest={'0' * 16}", "without folders"),
        ("function=prep.py:f digest=0", "digest is '0'"),
        (f"pixels/255 function=prep.py:f digest={'0' * 16}", "numbers can't be given beside a function"),
        (f"image_size=3 crop=2 function=prep.py:f digest={'0' * 16}", "image_size and crop can't be given"),
        ("mean=" + "1," * 9999, "can't be read"),
    ],
)
def test_other_texts_are_refused(text, word):
    with pytest.raises(DataError) as error:
        Preparation.parse(text)
    assert word in str(error.value)
    assert f"preparation is {text[:50]!r}"[:40] in str(error.value)
    assert len(str(error.value)) < 500


def test_differences_are_told_in_words():
    one = Preparation("pixels/255", image_size=32, mean=(0.5, 0.5, 0.5), std=(1, 1, 1))
    two = Preparation("pixels/255", resize=32, mean=(0.5, 0.4, 0.5), std=(1, 1, 1))
    assert one.difference(two) == (
        "image_size is 32 here, not given there; resize is not given here, 32 there; "
        "mean is 0.5,0.5,0.5 here, 0.5,0.4,0.5 there"
    )
    assert one.difference(two, "in a.stats", "in b.stats").startswith(
        "image_size is 32 in a.stats, not given in b.stats"
    )
    assert Preparation(image_size=8).difference(Preparation(image_size=8, interpolation="box")) == (
        "interpolation is bilinear here, box there"
    )
    tables = [Preparation(f"columns:{digit * 8}") for digit in "ab"]
    assert "other names, or another order" in tables[0].difference(tables[1])
    assert "other names" not in tables[0].difference(Preparation("values"))
    files = [Preparation(function="prep.py:f", digest=digit * 16) for digit in "ab"]
    assert "prep.py is not the same file" in files[0].difference(files[1])


def test_a_function_travels_by_its_name_and_a_digest_of_its_file(tmp_path):
    path = tmp_path / "prep.py"
    path.write_text("def transform(image):\n    return image\n")
    made = Preparation.of_function(f"{path}:transform", channels=1)
    assert (made.function, made.channels, made.path) == ("prep.py:transform", 1, path)
    assert str(tmp_path) not in str(made)
    (tmp_path / "there").mkdir()
    same = tmp_path / "there" / "prep.py"
    same.write_bytes(path.read_bytes())
    assert Preparation.of_function(f"{same}:transform", channels=1) == made
    same.write_text("def transform(image):\n    return 2 * image\n")
    assert "digest" in Preparation.of_function(f"{same}:transform", channels=1).difference(made)
    for spec, word in (
        (f"{path}", "it must be like"),
        ("prep:transform", "it must be like"),
        (f"{path}:", "it must be like"),
        (f"{path}:trans form", "it must be like"),
        (f"{tmp_path}/none.py:transform", "there is no such file"),
    ):
        with pytest.raises(UsageError) as error:
            Preparation.of_function(spec)
        assert word in str(error.value)
    with pytest.raises(UsageError, match="prep.py:transform, a function of your own, which can't be exported"):
        as_module(made)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_module_does_what_sites_do(channels):
    mean, std = (0.485, 0.456, 0.406)[:channels], (0.229, 0.224, 0.225)[:channels]
    x = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, channels, -1, -1)
    expected = normalise(x, *(torch.tensor(values).view(-1, 1, 1) for values in (mean, std)))
    for numbers in (None, "pixels/255"):
        module = as_module(Preparation(numbers, image_size=16, mean=mean, std=std))
        assert torch.equal(module(x), expected)
        assert torch.allclose(module(x / 255), expected, atol=1e-6)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(module, (x,)).module()
        assert torch.equal(program(x), expected)
    plain = as_module(Preparation())
    assert torch.equal(plain(x), x / 255)
    assert torch.equal(plain(x / 255), x / 255)


def test_the_module_takes_vectors_as_they_are():
    x = torch.tensor([[1.0, 300.0], [2.0, -5.0]])
    for numbers in ("values", "columns:01234567"):
        assert torch.equal(
            as_module(Preparation(numbers, mean=(1, 100), std=(2, 50)))(x),
            (x - torch.tensor([1, 100])) / torch.tensor([2, 50]),
        )
        assert torch.equal(as_module(Preparation(numbers))(torch.tensor([[3]])), torch.tensor([[3.0]]))
