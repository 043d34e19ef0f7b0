"""What mkdocs does beside its own work: two generated pages, files from outside docs/, and examples in docstrings."""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

import click
import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = ("SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/RESULTS.md", "benchmarks/notes/*.md",
           "results/*.md", "examples/*.py", "examples/nvflare/*.py", "examples/nvflare/README.md")  # fmt: skip


# ---------------------------------------------------------------------------------------------- files from outside


def on_files(files: Files, config: Any) -> Files:
    """Add the texts and examples that stand elsewhere in the repository, each as a page."""
    for path in (path for pattern in OUTSIDE for path in sorted(ROOT.glob(pattern))):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            text = f"# {name}\n\n```python\n{text}```\n"
        files.append(File.generated(config, _page(name), content=text))
    return files


def _page(name: str) -> str:
    return name.removesuffix(".py") + ".md" if name.endswith(".py") else name


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill generated pages, and let links that leave docs/ lead to the pages made of their targets."""
    here = page.file.src_uri
    source = posixpath.dirname(f"docs/{here}" if (ROOT / "docs" / here).exists() else here)
    markdown += {"reference/api.md": _public_names, "reference/cli.md": _commands}.get(here, str)()

    def led(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        place = posixpath.normpath(posixpath.join(source, target))
        if not (ROOT / place).exists():
            return match[0]  # mkdocs warns
        if not place.startswith("docs/") and not any(Path(place).match(pattern) for pattern in OUTSIDE):
            return text  # a file without a page
        place = posixpath.relpath(_page(place.removeprefix("docs/")), posixpath.dirname(here) or ".")
        return f"[{text}]({place}{anchor or ''})"

    return re.sub(r"\[([^\]]*)\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)", led, markdown)


# ---------------------------------------------------------------------------------------------- generated pages


def _public_names() -> str:
    """The public names, by package, as `unskew/__init__.pyi` has them."""
    stub = ast.parse((ROOT / "src" / "unskew" / "__init__.pyi").read_text(encoding="utf-8"))
    packages: dict[str, list[str]] = {}
    for line in stub.body:
        if isinstance(line, ast.ImportFrom) and line.module:
            package = line.module.split(".")[1]
            packages.setdefault(package, []).extend(f"::: {line.module}.{name.name}" for name in line.names)
    return "".join(
        f"\n## unskew.{package}\n\n{_about(package)}\n\n" + "\n\n".join(names) + "\n"
        for package, names in packages.items()
    )


def _about(package: str) -> str:
    home = ROOT / "src" / "unskew" / package
    path = home / "__init__.py" if home.is_dir() else home.with_suffix(".py")
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n\n")[0]


def _commands() -> str:
    """Every command with its options, as click knows them."""
    from unskew.cli.main import app

    def section(command: click.Command, name: str, parent: click.Context | None) -> str:
        context = click.Context(command, info_name=name, parent=parent, max_content_width=100, terminal_width=100)
        own = f"\n## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"
        below = command.commands.items() if isinstance(command, click.Group) else ()
        return own + "".join(section(part, word, context) for word, part in sorted(below))

    return section(app, "unskew", None)


# ---------------------------------------------------------------------------------------------- docstrings


class FencedExamples(griffe.Extension):
    """Examples in docstrings are blocks of code, from `>>>` to the next empty line."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the examples of one docstring."""
        if obj.docstring:
            text = re.sub(r"(?m)^>>> .*(?:\n.+)*", lambda match: f"\n```pycon\n{match[0]}\n```\n", obj.docstring.value)
            obj.docstring.value = text
