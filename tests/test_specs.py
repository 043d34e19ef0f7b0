"""Specs: names with options, as text."""

import contextlib
import json
import sys

import pytest
from hypothesis import example, given, settings, strategies as st

from helpers.toys import toy_model
from unskew.conversation.model_file import is_code
from unskew.conversation.tasks import Task, file_in
from unskew.errors import UnskewError, UsageError
from unskew.experiments.experiment import Experiment
from unskew.methods import names
from unskew.models import foreign
from unskew.specs import (
    build,
    call_user_code,
    converted,
    defaults_of,
    is_own,
    load_function,
    names_code,
    parse,
    pieces_of,
)


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
    assert build("thing", "pair:b=3", {"pair": lambda a=1, b=2: (a, b)}) == (1, 3)
    with pytest.raises(UsageError, match="unknown thing 'pear': did you mean 'pair'"):
        build("thing", "pear", {"pair": lambda: 0})


def test_functions_in_files(tmp_path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def give(a=1):\n    return a\n\ndef fail():\n    return 1 / 0\n\nvalue = 3\n")
    assert load_function("method", f"{path}:give")() == 1
    assert call_user_code("method", "x", load_function("method", f"{path}:give"), a=4) == 4
    with pytest.raises(UsageError, match=r"method is 'x', which fails: ZeroDivisionError: .*mine\.py, line 5\)"):
        call_user_code("method", "x", load_function("method", f"{path}:fail"))
    with pytest.raises(UsageError, match=r"mine\.py has no function 'value'"):
        load_function("method", f"{path}:value")
    with pytest.raises(UsageError, match="there is no file"):
        load_function("method", f"{tmp_path}/other.py:give")
    path.write_text("def give(a=2):\n    return a\n")
    assert load_function("method", f"{path}:give")() == 2  # read anew


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project as people have them: packages with and without __init__.py, and files that import each other."""
    files = {
        "shop/__init__.py": "",
        "shop/models/__init__.py": "from .layers import LAYERS",
        "shop/models/layers.py": "LAYERS = 'shop'",
        "shop/models/net.py": "from . import LAYERS\nfrom ..sizes import SIZE\ndef build(x=1): return LAYERS, SIZE, x",
        "shop/sizes.py": "SIZE = 3",
        "loose/net.py": "from .layers import LAYERS\nfrom ..common import NAME\ndef build():\n    return LAYERS, NAME",
        "loose/layers.py": "LAYERS = 'loose'",
        "common.py": "NAME = 'common'\nclass Net:\n    def __init__(self, width=2):\n        self.width = width",
        "one/net.py": "import neighbours\nfrom parts import deep\ndef build():\n    return neighbours.NAME, deep.NAME",
        "one/neighbours.py": "NAME = 'one'",
        "one/parts/deep.py": "NAME = 'deep one'",
        "two/net.py": "import neighbours\nfrom parts import deep\ndef build():\n    return neighbours.NAME, deep.NAME",
        "two/neighbours.py": "NAME = 'two'",
        "two/parts/deep.py": "NAME = 'deep two'",
        "two/json.py": "NAME = 'not that of Python'",
        "v1.0/net.py": "from .layers import LAYERS\ndef build():\n    return LAYERS",
        "v1.0/layers.py": "LAYERS = 'v1.0'",
        "late.py": "def build():\n    import common\n    return common.NAME",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    before, path = dict(sys.modules), list(sys.path)
    yield tmp_path
    for name in set(sys.modules) - set(before):
        del sys.modules[name]
    sys.path[:] = path


@pytest.mark.parametrize("elsewhere", [False, True])
def test_functions_in_packages(project, elsewhere, monkeypatch) -> None:
    start = f"{project}/" if elsewhere else ""
    if elsewhere:
        monkeypatch.chdir("/")
    assert load_function("model", f"{start}shop/models/net.py:build")(x=2) == ("shop", 3, 2)
    assert load_function("model", f"{start}v1.0/net.py:build")() == "v1.0"
    assert load_function("model", f"{start}late.py:build")() == "common"
    if not elsewhere:
        assert load_function("model", "loose/net.py:build")() == ("loose", "common")


def test_files_of_the_same_name_stand_beside_different_files(project) -> None:
    for _ in range(2):
        for name in ("one", "two"):
            assert load_function("model", f"{name}/net.py:build")() == (name, f"deep {name}")
    assert sys.modules["json"].__name__ == "json"
    assert json.loads("1") == 1


def test_modules_of_python_by_their_names(project) -> None:
    for spec, expected in {
        "shop.models.net:build": ("shop.models.net:build", {}),
        "shop.models.net:build:x=4": ("shop.models.net:build", {"x": "4"}),
        "common:Net:width=3": ("common:Net", {"width": "3"}),
        "nothing:here=1": ("nothing", {"here": "1"}),
    }.items():
        assert parse(spec) == expected
    assert load_function("model", "shop.models.net:build")() == ("shop", 3, 1)
    assert load_function("model", "common:Net")(width=5).width == 5
    assert [is_own(spec) for spec in ("common:Net", "shop:x", "loose.net:build", "torchvison:resnet18", "digits")] == [
        True,
        True,
        True,
        False,
        False,
    ]
    with pytest.raises(UsageError, match="model is 'shop.modles:build', which fails: ModuleNotFoundError"):
        load_function("model", "shop.modles:build")
    with pytest.raises(UsageError, match="shop.sizes has no function 'SIZE'"):
        load_function("model", "shop.sizes:SIZE")


# ---------------------------------------------------------------------------------------------- what is code


blank = st.text(st.sampled_from(" \t\n\r\x0b\x0c\x1c\x85\xa0\u2003\u2028\u200b\ufeff"), max_size=2)
word = st.sampled_from(
    [
        "bad.evil:f",
        "evil:f",
        "evil.py:f",
        "./a+b/evil.py:f",
        "no.such.module:f",
        "\uff45vil.x:f",
        "fedavg",
        "fedprox:mu=1e+2",
        "small-cnn:channels=1:size=8",
        "x.pt2",
        "",
        ":",
        ".",
        "=",
        "z=1",
        "+",
        "1e",
    ]
)
joint = st.sampled_from(["+", "+ ", ":", " :", ".", "\t+\n", ""])
named = st.lists(st.tuples(blank, word, blank, joint), min_size=1, max_size=4).map(
    lambda rows: "".join(before + text + after + end for before, text, after, end in rows)
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """The names of functions that somebody has asked for, none of which is given; in a folder with an evil.py."""

    def asked(kind, name):
        found.append(name)
        raise UsageError("asked for")

    found, folder = [], tmp_path_factory.mktemp("evil")
    (folder / "evil.py").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(names, "load_function", asked)
        patch.setattr(foreign, "load_function", asked)
        patch.setattr(foreign, "_program", lambda path, trust: asked("model", path))
        yield found


@settings(deadline=None, max_examples=300)
@example(" bad.evil:f")
@example("fedavg+ bad.evil:f:z=1")
@example("fedavg+\tevil:f")
@example(" evil.py:f")
@given(spec=named)
def test_whatever_would_be_imported_is_seen_before(loaded, spec) -> None:
    def asks_for_code(make) -> bool:
        loaded.clear()
        with contextlib.suppress(UnskewError):
            make()
        return bool(loaded)

    assert not asks_for_code(lambda: names.skeleton(spec, toy_model()))  # of a file's metadata: nothing is run
    if asks_for_code(lambda: names.method(spec)):
        assert names_code(spec)
        assert "method" in Experiment(method=spec).code
    if asks_for_code(lambda: foreign.load_module(spec, classes=3)):
        assert is_code(spec)
        assert "model" in Experiment(model=spec).code or spec.endswith(".pt2")
        with contextlib.suppress(UsageError):  # a task can be refused for other reasons
            assert Task(spec, files={str(file_in(spec)): "0"}).code
    for piece in pieces_of(spec):
        assert piece == piece.strip()
        assert is_own(piece) or not asks_for_code(lambda piece=piece: parsed_code(piece))


def parsed_code(piece: str) -> None:
    name, _ = parse(piece)
    if ":" in name:
        names.load_function("method", name)


def test_what_a_name_is_does_not_depend_on_which_modules_are_there() -> None:
    assert is_own("not_there_yet.module:f")
    assert not is_own("fourier:1000:7")


def test_a_spec_has_few_pieces() -> None:
    with pytest.raises(UsageError, match="has 100,001 pieces joined by .: at most 64"):
        names_code("+" * 100_000)
