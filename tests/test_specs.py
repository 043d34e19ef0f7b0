"""Specs: names with options, as text."""

import pytest

from unskew.errors import UsageError
from unskew.specs import called, converted, defaults_of, made, own, parse


def test_specs() -> None:
    assert parse("fedavg") == ("fedavg", {})
    assert parse(" ccvr:transform=relu-tukey:0.5:samples=9") == (
        "ccvr",
        {"transform": "relu-tukey:0.5", "samples": "9"},
    )
    with pytest.raises(UsageError, match=r"'0\.1' is not of the form option=value"):
        parse("fedprox:0.1")
    defaults = {"count": 1, "share": 0.5, "flag": False, "text": "a"}
    given = {"count": "3", "share": "1e-3", "flag": "TRUE", "text": "b:c"}
    assert converted("x", given, defaults) == {"count": 3, "share": 0.001, "flag": True, "text": "b:c"}
    for name, text in (("count", "1.5"), ("share", "x"), ("share", "inf"), ("flag", "1"), ("count", "")):
        with pytest.raises(UsageError, match=f"{name} is '{text}', which is not"):
            converted("x", {name: text}, defaults)
    with pytest.raises(UsageError, match="unknown option in 'x': 'shar': did"):
        converted("x", {"shar": "1"}, defaults)
    assert parse("a/b.py:factory:mu=1") == ("a/b.py:factory", {"mu": "1"})
    assert parse("a/b.py:mu=1") == ("a/b.py", {"mu": "1"})


def test_only_plain_defaults_are_options() -> None:
    def factory(base, mu=0.5, only=None, flag=True, name="x", *, more=3):
        return base, mu, only, flag, name, more

    assert defaults_of(factory) == {"mu": 0.5, "flag": True, "name": "x", "more": 3}


def test_a_spec_calls_its_factory() -> None:
    assert made("thing", "pair:b=3", {"pair": lambda a=1, b=2: (a, b)}) == (1, 3)
    with pytest.raises(UsageError, match="unknown thing 'pear': did you mean 'pair'"):
        made("thing", "pear", {"pair": lambda: 0})


def test_functions_in_files(tmp_path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def give(a=1):\n    return a\n\ndef fail():\n    return 1 / 0\n\nvalue = 3\n")
    assert own("method", f"{path}:give")() == 1
    assert called("method", "x", own("method", f"{path}:give"), a=4) == 4
    with pytest.raises(UsageError, match=r"method is 'x', which fails: ZeroDivisionError: .*mine\.py, line 5\)"):
        called("method", "x", own("method", f"{path}:fail"))
    with pytest.raises(UsageError, match=r"mine\.py has no function 'value'"):
        own("method", f"{path}:value")
    with pytest.raises(UsageError, match="there is no file"):
        own("method", f"{tmp_path}/other.py:give")
