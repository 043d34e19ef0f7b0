"""What the package promises as a whole: what importing it costs, that names are documented, that examples run."""

import ast
import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import unskew
from helpers.commands import ENVIRONMENT

SOURCE = Path(unskew.__file__).parent
CORE = ("tree", "seeds", "data.datasets", "data.partition", "models.networks", "models.cutting", "models.evaluate",
        "models.transforms", "methods.optim", "methods.presets", "training.client", "training.simulate",
        "training.aggregate", "statistics.moments", "calibration.virtual", "calibration.ridge",
        "calibration.discriminants", "calibration.selection")  # fmt: skip
ELSEWHERE = ("unskew.__main__", *([] if importlib.util.find_spec("triton") else ["_kernels"]))
MODULES = sorted(
    item.name for item in pkgutil.walk_packages([str(SOURCE)], "unskew.") if not item.name.endswith(ELSEWHERE)
)


def printed(code: str) -> list[str]:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, text=True).stdout.split()


def test_the_core_imports_torch_and_numpy_alone() -> None:
    imports = "\n".join(f"import unskew.{name}" for name in CORE)
    top = "{name.partition('.')[0] for name in sys.modules}"
    ours = set(
        printed(f"import sys, torch, numpy.random\nbefore = {top}\nimport unskew\n{imports}\nprint(*{top} - before)")
    )
    assert ours - set(sys.stdlib_module_names) == {"unskew"}


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["try", "--help"], ["stats", "--help"], ["--version"]]
)
def test_help_is_quick(arguments) -> None:
    code = f"""
import sys
from unskew.cli.main import main
sys.argv = ["unskew", *{arguments}]
try:
    main()
finally:
    print("loaded:", *sys.modules)
"""
    loaded = printed(code)
    loaded = loaded[loaded.index("loaded:") :]
    assert not {"torch", "numpy", "matplotlib", "sklearn"} & {name.partition(".")[0] for name in loaded}
    assert "unskew.cli.main" in loaded


def test_importing_the_package_imports_nothing_yet() -> None:
    assert "torch" not in printed("import sys, unskew\nprint(*sys.modules)")


@pytest.mark.parametrize("name", [name for name in unskew.__all__ if name != "__version__"])
def test_public_names_are_there_and_documented(name) -> None:
    value = getattr(unskew, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert inspect.getdoc(value)
        assert value.__module__.startswith("unskew.")
    assert name in dir(unskew)


def test_type_checkers_see_the_names_that_python_sees() -> None:
    tree = ast.parse(Path(unskew.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    typed = {alias.asname: node.module for node in imports for alias in node.names}
    assert sorted(typed) == sorted(set(unskew.__all__) - {"__version__"})
    for name, module in typed.items():
        assert getattr(importlib.import_module(module), name) is getattr(unskew, name)


def test_unknown_names_are_unknown() -> None:
    for module in (unskew, importlib.import_module("unskew.experiments")):
        with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
            _ = module.nonsense


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name) -> None:
    names = {"torch": torch, "np": np, "unskew": unskew}
    failed, _ = doctest.testmod(
        importlib.import_module(name), extraglobs=names, optionflags=doctest.IGNORE_EXCEPTION_DETAIL
    )
    assert failed == 0


@pytest.mark.parametrize("name", sorted(set(unskew.__all__) - {"__version__"}))
def test_every_public_name_has_an_example(name) -> None:
    value = getattr(unskew, name)
    assert isinstance(value, types.UnionType) or doctest.DocTestParser().get_examples(value.__doc__)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is_for(name) -> None:
    assert (importlib.import_module(name).__doc__ or "").strip()


def test_no_file_is_long() -> None:
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCE.rglob("*.py")}
    assert {name: length for name, length in lengths.items() if length > 500} == {}


def test_no_function_bears_the_name_of_a_module_beside_it() -> None:
    functions = {
        f"{name.rpartition('.')[0]}.{key}"
        for name in MODULES
        for key, value in vars(importlib.import_module(name)).items()
        if inspect.isfunction(value) and value.__module__ == name and not key.startswith("_")
    }
    assert functions & set(MODULES) == {"unskew.cli.main"}
