"""The page: sections of figures, tables and sentences as one HTML file that needs no network.

Whatever comes from files or options is escaped, or stands as JSON that is read and never run. Besides, the page's own
policy lets only the two scripts run whose digests it names, and loads nothing from anywhere.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources

from unskew.errors import printable
from unskew.report.charts import VERSION, Figure, inline


@dataclass(frozen=True)
class Grid:
    """A table: its columns, and rows of text; the first column is text, the others are numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: bool = True


@dataclass(frozen=True)
class Pictures:
    """Rows of pictures with a caption each: PNG files as bytes."""

    rows: Sequence[tuple[str, Sequence[bytes]]]


@dataclass(frozen=True)
class Beside:
    """Charts that stand beside each other where there is room."""

    figures: Sequence[Figure]


Part = Figure | Beside | Grid | Pictures | str
"""A string is a paragraph."""


@dataclass(frozen=True)
class Section:
    """A part of a page under a heading."""

    title: str
    parts: list[Part] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # what is missing, and what would help

    def leave_out(self, why: str) -> None:
        """Say what is missing, once."""
        if why not in self.left_out:
            self.left_out.append(why)

    @property
    def anchor(self) -> str:
        """Its place in the page."""
        return "".join(letter if letter.isalnum() else "-" for letter in self.title.lower())

    @property
    def figures(self) -> list[Figure]:
        """Its charts."""
        found: list[Figure] = []
        for part in self.parts:
            found += [part] if isinstance(part, Figure) else part.figures if isinstance(part, Beside) else []
        return found


def html_of(title: str, lead: str, sections: Sequence[Section], warning: str | None = None) -> str:
    """The whole page as text."""
    style, script, library = _resource("page.css"), _resource("page.js"), _library()
    policy = (
        f"default-src 'none'; script-src {_digest(library)} {_digest(script)}; style-src 'unsafe-inline'; img-src data:"
    )
    contents = "".join(f'<li><a href="#{one.anchor}">{_text(one.title)}</a></li>' for one in sections)
    doubt = f'<p class="warning">{_text(warning)}</p>' if warning else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{_text(title)}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{_text(title)}</h1><p class="lead">{_text(lead)}</p>{doubt}
<nav aria-label="Contents"><ol>{contents}</ol></nav></header>
<main>
{"".join(map(_section, sections))}
</main>
<footer><p>Point at a chart for its numbers. Drag to move where there are two scales, shift and wheel to zoom,
double-click to go back. Each figure is also an SVG, a PNG and a CSV file in the folder beside this page.</p>
<noscript><p class="warning">Charts need scripts, which are switched off here: see those files.</p></noscript></footer>
<!-- {NOTICE} -->
<script>{library}</script>
<script>{script}</script>
</body>
</html>
"""


NOTICE = """Charts are drawn by Vega, Vega-Lite and Vega-Embed, which stand below under the BSD 3-Clause licence:
Copyright (c) 2015-2025, University of Washington Interactive Data Lab and contributors. All rights reserved.
Redistribution and use in source and binary forms, with or without modification, are permitted provided that the
following conditions are met: 1. Redistributions of source code must retain the above copyright notice, this list of
conditions and the following disclaimer. 2. Redistributions in binary form must reproduce the above copyright notice,
this list of conditions and the following disclaimer in the documentation and/or other materials provided with the
distribution. 3. Neither the name of the copyright holder nor the names of its contributors may be used to endorse or
promote products derived from this software without specific prior written permission.
THIS SOFTWARE IS PROVIDED BY THE COPYRIGHT HOLDERS AND CONTRIBUTORS "AS IS" AND ANY EXPRESS OR IMPLIED WARRANTIES,
INCLUDING, BUT NOT LIMITED TO, THE IMPLIED WARRANTIES OF MERCHANTABILITY AND FITNESS FOR A PARTICULAR PURPOSE ARE
DISCLAIMED. IN NO EVENT SHALL THE COPYRIGHT HOLDER OR CONTRIBUTORS BE LIABLE FOR ANY DIRECT, INDIRECT, INCIDENTAL,
SPECIAL, EXEMPLARY, OR CONSEQUENTIAL DAMAGES (INCLUDING, BUT NOT LIMITED TO, PROCUREMENT OF SUBSTITUTE GOODS OR
SERVICES; LOSS OF USE, DATA, OR PROFITS; OR BUSINESS INTERRUPTION) HOWEVER CAUSED AND ON ANY THEORY OF LIABILITY,
WHETHER IN CONTRACT, STRICT LIABILITY, OR TORT (INCLUDING NEGLIGENCE OR OTHERWISE) ARISING IN ANY WAY OUT OF THE USE OF
THIS SOFTWARE, EVEN IF ADVISED OF THE POSSIBILITY OF SUCH DAMAGE."""


@functools.cache
def _library() -> str:
    """The scripts of Vega, which a page holds once."""
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VERSION)


def _resource(name: str) -> str:
    return resources.files("unskew.report").joinpath(name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _text(value: str) -> str:
    """Text as a page may get it."""
    return escape(printable(value))


def _section(section: Section) -> str:
    left = "".join(f'<p class="left-out">Left out: {_text(why)}</p>' for why in section.left_out)
    parts = "\n".join(map(_part, section.parts))
    return f'<section id="{section.anchor}"><h2>{_text(section.title)}</h2>\n{parts}{left}</section>\n'


def _part(part: Part) -> str:
    if isinstance(part, str):
        return f"<p>{_text(part)}</p>"
    if isinstance(part, Beside):
        return f'<div class="beside">{"".join(map(_part, part.figures))}</div>'
    if isinstance(part, Grid):
        return _grid(part)
    if isinstance(part, Pictures):
        return _pictures(part)
    name = escape(part.name, quote=True)
    return (
        f'<figure id="figure-{name}"><h3>{_text(part.title)}</h3>'
        f'<div class="chart" role="img" aria-label="{_text(part.says)}"></div>'
        f'<script type="application/json">{inline(part.drawn("container"))}</script>'
        f"<figcaption>{_text(part.says)}</figcaption></figure>"
    )


def _grid(grid: Grid) -> str:
    kinds = ["text", *["number" if grid.numbers else "text"] * (len(grid.columns) - 1)]
    heads = "".join(f'<th class="{kind}">{_text(name)}</th>' for kind, name in zip(kinds, grid.columns, strict=True))
    rows = "".join(
        "<tr>"
        + "".join(f'<td class="{kind}">{_text(cell)}</td>' for kind, cell in zip(kinds, row, strict=True))
        + "</tr>"
        for row in grid.rows
    )
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'


def _pictures(pictures: Pictures) -> str:
    rows = []
    for caption, files in pictures.rows:
        shown = "".join(
            f'<img alt="{_text(caption)}, {place}" src="data:image/png;base64,{base64.b64encode(file).decode()}">'
            for place, file in enumerate(files, 1)
        )
        rows.append(f'<div class="pictures"><span>{_text(caption)}</span><div>{shown}</div></div>')
    return "".join(rows)
