"""What a model takes, in a line of text."""

import pytest
import torch

from unskew.errors import DataError
from unskew.models.inputs import described, joined, parsed, stand_in, varies
from unskew.statistics.origin import Origin

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
        ({"x": IMAGES}, "x:float32[3,8,8]", False),
        ([WORDS, WORDS], "int64[16] int64[16]", True),
    ],
)
def test_a_line_makes_inputs_of_the_kind_that_it_was_made_from(x, line, free):
    assert described(x, 4) == line
    assert varies(line) == free
    again = stand_in(line, examples=4)
    assert described(again, 4) == line
    if isinstance(x, dict) or (isinstance(x, tuple) and len(x) > 1):
        assert type(again) is type(x)


@pytest.mark.parametrize(
    "x", [None, 3, [], (), {}, (IMAGES, None), {"x": IMAGES, "n": 3}, (IMAGES, torch.ones(3)), torch.tensor(1.0),
          {"a b": IMAGES}, torch.ones(4, 0)],
)  # fmt: skip
def test_what_is_not_a_row_for_each_example_has_no_line(x):
    assert described(x, 4) is None


OTHERS = """
abc float32 float32[ float32[-1] float32[0] float32[03] float32[3,] float99[3] nn[3] qint8[3] float4_e2m1fn_x2[4]
complex64[3] float32[1\u0663] float32[99999999999] x-y:float32[3] :float32[3]
"""


@pytest.mark.parametrize(
    "line", [*OTHERS.split(), "", " ", "float32[3] ", "x:float32[3] float32[3]", "x:float32[3] x:float32[3]"]
)
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
    with pytest.raises(DataError, match="different inputs"):
        Origin(inputs="pixels:float32[3,8,8]").joined(Origin(inputs="pixels:float32[3,9,9]"))
    with pytest.raises(DataError, match="different inputs"):
        Origin(inputs="ids:int64[8]").joined(Origin(inputs="words:int64[8]"))
    assert Origin(inputs="a:int64[8] b:float32[8]").joined(Origin(inputs="a:int32[9] b:float32[9]")).inputs is not None


def test_what_a_line_may_say_has_bounds():
    assert parsed("float32[" + "9" * 5000 + "]") == []
    assert parsed(" ".join(f"x{number}:float32[]" for number in range(65))) == []
    assert parsed("a:float32[100000000] b:float32[100000000]") == []
