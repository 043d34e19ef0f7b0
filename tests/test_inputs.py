"""What a model takes, in a line of text."""

import pytest
import torch

from unskew.errors import DataError
from unskew.inputs import described, joined, parsed, stand_in, varies
from unskew.statistics import Origin

WORDS = torch.ones(4, 16, dtype=torch.int64)
IMAGES = torch.ones(4, 3, 8, 8)


@pytest.mark.parametrize(
    ("x", "line", "free"),
    [
        (IMAGES, "float32[3,8,8]", False),
        (IMAGES.byte(), "uint8[3,8,8]", False),
        (IMAGES.bfloat16(), "bfloat16[3,8,8]", False),
        ((IMAGES,), "float32[3,8,8]", False),
        (WORDS, "int64[16]", True),
        (WORDS > 0, "bool[16]", True),
        ((IMAGES, WORDS), "float32[3,8,8] int64[16]", True),
        ({"input_ids": WORDS, "age": torch.ones(4)}, "input_ids:int64[16] age:float32[]", True),
        ({"x": IMAGES}, "x:float32[3,8,8]", True),
    ],
)
def test_a_line_makes_inputs_of_the_kind_that_it_was_made_from(x, line, free):
    assert described(x, 4) == line
    assert varies(line) == free
    again = stand_in(line, examples=4)
    assert described(again, 4) == line
    if not isinstance(x, tuple) or len(x) > 1:
        assert type(again) is type(x)


@pytest.mark.parametrize(
    "x", [None, 3, [IMAGES], (), {}, (IMAGES, None), {"x": IMAGES, "n": 3}, (IMAGES, torch.ones(3)), torch.tensor(1.0),
          {"a b": IMAGES}, torch.ones(4, 0)],
)  # fmt: skip
def test_what_is_not_a_row_for_each_example_has_no_line(x):
    assert described(x, 4) is None


@pytest.mark.parametrize(
    "line", ["", " ", "abc", "float32", "float32[", "float32[-1]", "float32[0]", "float32[03]", "float32[3] ",
             "float99[3]", "nn[3]", "x:float32[3] float32[3]", "x:float32[3] x:float32[3]", "float32[99999999999]",
             "float32[3,]"],
)  # fmt: skip
def test_other_texts_are_no_lines(line):
    assert parsed(line) == []
    with pytest.raises(DataError, match="inputs is"):
        Origin(inputs=line)


def test_batches_of_different_lengths_have_the_longest():
    assert joined([]) is None
    assert joined(["float32[3,8,8]"] * 2) == "float32[3,8,8]"
    assert joined(["float32[3,8,8]", "float32[3,9,9]"]) is None  # images of different sizes: no export, as ever
    assert joined(["int64[8]", "int64[12]", "int64[9]"]) == "int64[12]"
    assert joined(["a:int64[8] b:int64[8]", "a:int64[9] b:int64[9]"]) == "a:int64[9] b:int64[9]"
    assert joined(["int64[8]", "int64[8,2]"]) is None
    assert joined(["int64[8]", None]) is None


def test_sites_may_differ_in_the_length_of_texts_not_in_the_size_of_images():
    assert Origin(inputs="int64[8]").joined(Origin(inputs="int64[9]")).inputs == "int64[8]"
    with pytest.raises(DataError, match="different inputs"):
        Origin(inputs="float32[3,8,8]").joined(Origin(inputs="float32[3,9,9]"))
    with pytest.raises(DataError, match="different inputs"):
        Origin(inputs="float32[3,8,8]").joined(Origin(inputs="int64[9]"))
