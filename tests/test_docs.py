"""The texts do what they say: every block of code in README and docs/ runs, and links lead somewhere.

The blocks of a page run from top to bottom, in one folder. How they are marked:

* `python`: run; the blocks of a page share their names. With a title (`python title="net.py"`) it is a file instead.
* `bash` and `console` (`site$ unskew ...`): a command a line. With a title (`bash title="needs a GPU"`) commands are
  only checked: the command and its options exist, and their values are of the right type.
* `text`: what somebody sees. Nothing else is allowed.
"""

import importlib
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import click
import pytest
import torch
from safetensors.torch import save_file

from helpers.commands import unskew
from helpers.pictures import KINDS, folder_of
from unskew.calibration.calibrator import Calibrator
from unskew.calibration.selection import calibrators
from unskew.cli.main import app
from unskew.data.partition import partitions
from unskew.methods.names import pieces
from unskew.training.engines.registry import engines

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHERS = [path for folder in ("examples", "benchmarks") for path in sorted((ROOT / folder).rglob("*.md"))]
TEXTS = [*PAGES, ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md", *OTHERS]
NET = """
from torch import nn

def build(classes=3):
    return nn.Sequential(nn.AdaptiveAvgPool2d(6), nn.Flatten(), nn.Linear(36, 12), nn.ReLU(), nn.Linear(12, classes))
"""


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    title: str | None
    text: str


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks_of(path: Path) -> list[Block]:
    found = re.findall(r'(?ms)^```(\w*)(?: title="([^"]*)")?\n(.*?)^```$', path.read_text(encoding="utf-8"))
    return [Block(language, title or None, text) for language, title, text in found]


def commands_in(block: Block) -> list[list[str]]:
    """The words of each command, without comments; who types it does not matter."""
    lines = block.text.replace("\\\n", " ").splitlines()
    typed = [line.partition("$ ")[2] if block.language == "console" else line for line in lines]
    return [words for line in typed if (words := shlex.split(line, comments=True))]


# ---------------------------------------------------------------------------------------------- what pages find


def site(folder: Path) -> None:
    """A federation's files: a model, its weights, the names of its classes, images."""
    (folder / "net.py").write_text(NET)
    (folder / "names.txt").write_text("\n".join(KINDS))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        save_file(runpy.run_path(str(folder / "net.py"))["build"]().state_dict(), folder / "global.safetensors")
    for seed, name in enumerate(("a", "b", "c", "test", "my_images")):
        folder_of(folder / name, 60, seed)


def site_with_task(folder: Path) -> None:
    """The same, and a task."""
    site(folder)
    words = "task --model net.py:build --weights global.safetensors --labels names.txt --image-size 32 --hold-out 0.2"
    assert unskew(*words.split()).code == 0


SCENES: dict[str, Callable[[Path], None]] = {
    "README.md": site,
    "docs/guides/calibrate.md": site,
    "docs/guides/signed-files.md": site_with_task,
}


# ---------------------------------------------------------------------------------------------- running them


def run(words: list[str], folder: Path) -> None:
    """Run a command as the page has it, in this process where that is possible."""
    words = [str(found) for word in words
             for found in (sorted(path.name for path in folder.glob(word)) if "*" in word else [word])]  # fmt: skip
    program, *rest = words
    if program == "unskew":
        answer = unskew(*rest)
        assert answer.code == 0, f"{shlex.join(words)}: {answer.err}"
    elif program == "python":
        runpy.run_path(rest[0], run_name="__main__")
    elif program == "make":
        assert re.search(rf"(?m)^{rest[0]}:", (ROOT / "Makefile").read_text())
    elif program in ("mkdir", "cp"):
        subprocess.run(words, check=True, cwd=folder)
    else:
        assert program in ("git", "cd", "pip"), f"what is {program}?"


def check(words: list[str]) -> None:
    """Check a command without running it."""
    if "unskew" in words:
        *_, rest = (words[place + 1 :] for place, word in enumerate(words) if word == "unskew")
        app.commands[rest[0]].make_context(rest[0], rest[1:])


LONG = ("docs/tutorials/simulate-digits.md", "docs/guides/personal-models.md")  # they train for seconds
RUN = [
    pytest.param(path, marks=pytest.mark.slow if name_of(path) in LONG else (), id=name_of(path))
    for path in PAGES
    if blocks_of(path)
]


@pytest.mark.parametrize("path", RUN)
def test_blocks_run(path: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    SCENES.get(name_of(path), lambda folder: None)(tmp_path)
    names = {"__name__": "page"}
    before = set(sys.modules)
    for number, block in enumerate(blocks_of(path)):
        if block.language == "python" and not block.title:
            exec(compile(block.text, f"{name_of(path)}, block {number}", "exec"), names)
        elif block.language in ("python", "toml"):
            assert block.title, "a file needs a name"
            (tmp_path / block.title).write_text(block.text)
            importlib.invalidate_caches()
        elif block.language in ("bash", "console"):
            for words in commands_in(block):
                check(words) if block.title else run(words, tmp_path)
        else:
            assert block.language == "text", f"block {number} is {block.language or 'of no language'}: say what it is"
    for name in set(sys.modules) - before:  # those that lay in the folder
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


# ---------------------------------------------------------------------------------------------- reading them


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"(?ms)^```.*?^```$", "", path.read_text(encoding="utf-8"))
    for target, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)", text):
        found = path.parent / target if target else path
        assert found.exists(), f"points to {target}"
        if anchor and found.suffix == ".md" and not anchor.startswith("unskew."):
            headings = re.findall(r"(?m)^#+ (.*)$", found.read_text(encoding="utf-8"))
            assert anchor in {slug(heading) for heading in headings}, f"points to {target}#{anchor}"


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_files_that_are_named_are_there(path: Path) -> None:
    """By their paths from the root: `src/unskew/specs.py`, not `unskew/specs.py`."""
    folders = "src|tests|docs|benchmarks|results|examples|unskew"
    named = re.findall(rf"(?<![\w/])(?:{folders})/[\w/.-]+\.(?:py|pyi|md|toml)\b", path.read_text("utf-8"))
    assert [name for name in named if not (ROOT / name).is_file()] == []


def row_of(page: str, word: str) -> set[str]:
    """The names in backticks in the row of a table that begins with a word."""
    (row,) = re.findall(rf"(?m)^\| {word} \|.*$", (ROOT / page).read_text(encoding="utf-8"))
    return set(re.findall(r"`([\w-]+)`", row))


def table_of(page: str, head: str) -> list[str]:
    """The names in backticks in the first column of a table whose head begins with a word."""
    (table,) = re.findall(rf"(?m)^\| {head} \|.*\n((?:\|.*\n)+)", (ROOT / page).read_text(encoding="utf-8"))
    return re.findall(r"(?m)^\| `([\w-]+)` \|", table)


def test_pages_name_what_the_registries_hold() -> None:
    own = set(engines) - {"auto"}
    assert row_of("docs/reference/glossary.md", "calibrator") == set(calibrators)
    assert row_of("docs/reference/glossary.md", "engine") == own
    assert row_of("docs/reference/glossary.md", "partition") == set(partitions)
    assert table_of("docs/reference/calibrators.md", "name") == [*calibrators, "auto"]
    (printed,) = re.findall(r"(?s)\n as it is +.*?\n```", (ROOT / "docs/tutorials/first-calibration.md").read_text())
    assert re.findall(r"(?m)^ ([a-z]+)", printed)[1:] == list(calibrators)
    assert table_of("docs/explanation/speed.md", "engine") == [name for name in engines if name in own]
    (option,) = (param for param in app.commands["run"].params if "--engine" in param.opts)
    assert set(engines) <= set(re.findall(r"[\w-]+", str(option.help)))


def test_the_numbers_of_methods_and_calibrators_are_right() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"There are {len(pieces)} [methods]" in text
    assert f", {len(calibrators)} [calibrators]" in text


def test_every_field_of_a_calibrator_is_described() -> None:
    assert {*table_of("docs/guides/own-calibrator.md", "field of `Calibrator`"), "name", "fit"} == {
        field.name for field in fields(Calibrator)
    }


def slug(heading: str) -> str:
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())


def options_of(command: click.Command) -> set[str]:
    below = command.commands.values() if isinstance(command, click.Group) else ()
    names = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    return names.union(*map(options_of, below), {"--help"})


FOREIGN = {"--nproc-per-node", "--mutants", "--kills", "--seed", "--json-report"}  # torchrun's, the adversary's
FOREIGN |= {"--disable-runtime-dependency-installation", "--node-config", "--stream", "--format"}  # Flower's


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_option_in_a_text_is_an_option(path: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", path.read_text(encoding="utf-8")))
    assert named <= options_of(app) | FOREIGN | {"--strict", "--trained"}


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_prose_is_no_wider_than_a_page(path: Path) -> None:
    text = re.sub(r"(?ms)^```.*?^```$|^<!-- figures.*", "", path.read_text(encoding="utf-8"))
    assert [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")] == []


def test_every_page_is_in_the_contents() -> None:
    contents = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if f": {page}\n" not in contents] == []
