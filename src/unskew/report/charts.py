"""Charts: one description in Vega-Lite of each, from which come the page, SVG, PNG and CSV.

A `Figure` holds rows and a specification without data. What is ink (text, axes) is drawn in `currentColor`, so that a
page's light, dark and printed styles need no other description. Colours are those of Okabe and Ito (2008), which people
of all colour vision tell apart; more classes than colours have other shapes too. A specification is ours alone: texts
from files are only ever data, titles and orders, which Vega never reads as code.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unskew.errors import UsageError, printable
from unskew.files.writing import write_bytes, write_text

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7F7F7F"]
SHAPES = ["circle", "triangle-up", "square", "diamond", "cross", "triangle-down"]
BLUE, ORANGE = COLOURS[:2]
INK = "currentColor"
ONE: dict[str, Any] = {"color": {"value": BLUE}}  # where nothing is told apart
MANY = 500  # names that a chart can have at all
ROWS = 50_000  # numbers
FEW = 24  # names, or numbers in cells, that a chart can show legibly along one side
LABELS = 16  # characters of a name along an axis
Spec = dict[str, Any]

_axis = {
    "labelColor": INK, "titleColor": INK, "domainColor": INK, "tickColor": INK, "gridColor": INK, "gridOpacity": 0.12,
    "domainOpacity": 0.4, "tickOpacity": 0.4, "labelFontSize": 11, "titleFontSize": 12, "titleFontWeight": "normal",
    "labelLimit": 130,
}  # fmt: skip
_legend = {"labelColor": INK, "titleColor": INK, "labelFontSize": 11, "titleFontSize": 12, "labelLimit": 220,
           "titleFontWeight": "normal", "orient": "bottom", "columns": 4, "symbolOpacity": 1}  # fmt: skip
CONFIG: Spec = {
    "font": "Helvetica, Arial, sans-serif",
    "background": None,
    "axis": _axis,
    "legend": _legend,
    "header": {"labelColor": INK, "titleColor": INK, "labelFontSize": 12, "labelFontWeight": "bold"},
    "title": {"color": INK},
    "view": {"stroke": None},
    "text": {"color": INK},
    "range": {"category": COLOURS},
}


@dataclass(frozen=True)
class Figure:
    """A chart with its data, and one sentence that says what it shows in this run."""

    name: str  # of its files
    title: str
    says: str
    rows: list[dict[str, Any]]
    spec: Spec

    def drawn(self, width: int | str) -> Spec:
        """The whole specification, at a width in pixels or that of its container."""
        view = {"width": width} if "facet" not in self.spec else {}
        fit = {"autosize": {"type": "fit-x", "contains": "padding"}} if width == "container" else {}
        values = {"data": {"values": self.rows}}
        return _plain({"$schema": SCHEMA, "config": CONFIG, **self.spec, **view, **fit, **values})

    def check(self) -> None:
        """Refuse what a browser could not draw."""
        if len(self.rows) > ROWS:
            raise UsageError(f"{self.title}: {len(self.rows):,} numbers are more than a chart shows, {ROWS:,}")

    def csv(self) -> str:
        """Its data, a line a row; pictures are left out."""
        names = [name for name in (self.rows[0] if self.rows else {}) if name != "picture"]
        out = io.StringIO()
        writer = csv.DictWriter(out, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _cell(value) for key, value in row.items()} for row in self.rows)
        return out.getvalue()

    def save(self, folder: Path) -> list[Path]:
        """Write it as SVG, PNG and CSV."""
        import vl_convert

        spec = {**self.drawn(WIDTH), "background": "white"}
        paths = [folder / f"{self.name}.{kind}" for kind in ("svg", "png", "csv")]
        drawn = vl_convert.vegalite_to_svg(spec, vl_version=VERSION)
        write_text(paths[0], drawn)
        write_bytes(paths[1], vl_convert.svg_to_png(drawn, scale=2))
        write_text(paths[2], self.csv())
        return paths


VERSION = "6.4"  # of Vega-Lite
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
WIDTH = 640  # pixels of a chart in a file


def _plain(value: Any) -> Any:
    """A specification as JSON and XML have it: what is not finite is null, and no text has control characters."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, str):
        return printable(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


FORMULA = re.compile(
    "(^|[;,\\t\\r\\n])(?=[-=+@\\uff1d\\uff0b\\uff0d\\uff20\\t\\r])"
)  # at the beginning of what may be a cell


def _cell(value: Any) -> Any:
    """A cell that no spreadsheet takes for a formula, whatever it takes for the end of a cell: texts are strangers'.

    >>> _cell("=1+1"), _cell("a;=1+1"), _cell("a=1"), _cell(-1)
    ("'=1+1", "a;'=1+1", 'a=1', -1)
    """
    return FORMULA.sub(lambda found: f"{found[1]}'", value) if isinstance(value, str) else value


# ---------------------------------------------------------------------------------------------- encodings


def axis(field: str, title: str | None = None, kind: str = "quantitative", **more: Any) -> Spec:
    """The channel of a field: a number, unless another kind is given; a title of "" is none."""
    return {"field": field, "type": kind, "title": field if title is None else title or None, **more}


def names(field: str, order: Sequence[str], title: str | None = None, upright: bool = False) -> Spec:
    """The channel of names in a given order along an axis, the one below a chart or the `upright` one beside it."""
    if len(order) > MANY:
        raise UsageError(f"{len(order):,} names ({field}) are more than a chart shows, {MANY}")
    flat = upright or max(map(len, order), default=0) <= 3 or sum(map(len, order)) <= 50
    return axis(field, title, "nominal", sort=list(order), axis={"labelLimit": 120, "labelAngle": 0 if flat else -40})


def hover(*fields: str, **formats: str) -> list[Spec]:
    """What is shown of an example that the mouse points at."""
    return [{"field": name, **({"format": formats[name]} if name in formats else {})} for name in fields]


ZOOM: Spec = {"name": "zoom", "select": {"type": "interval", "zoom": "wheel![event.shiftKey]"}, "bind": "scales"}


def by(field: str, order: Sequence[str], title: str | None = None) -> Spec:
    """The channels that tell names apart: colours, and shapes too where there are more names than colours."""
    if len(order) > MANY:
        raise UsageError(f"{len(order):,} names ({field}) are more than a chart shows, {MANY}")
    places = range(len(order))
    colours = [COLOURS[place % len(COLOURS)] for place in places]
    legend = {} if 1 < len(order) <= 4 * FEW else {"legend": None}
    found = {"color": axis(field, title, "nominal", scale={"domain": list(order), "range": colours}, **legend)}
    if len(order) > len(COLOURS):
        shapes = [SHAPES[place // len(COLOURS) % len(SHAPES)] for place in places]
        scale = {"domain": list(order), "range": shapes}
        found["shape"] = axis(field, title, "nominal", scale=scale, **legend)
    return found


# ---------------------------------------------------------------------------------------------- kinds of charts


def lines(x: Spec, y: Spec, series: Spec, tooltip: list[Spec], height: int = 260) -> Spec:
    """Lines over a number; with points, so that one value alone is seen."""
    mark = {"type": "line", "point": {"size": 36, "filled": True}, "strokeWidth": 2}
    return {"height": height, "params": [ZOOM], "mark": mark,
            "encoding": {"x": x, "y": y, **series, "tooltip": tooltip}}  # fmt: skip


def bars(x: Spec, y: Spec, series: Spec, tooltip: list[Spec], height: int = 260, beside: str | None = None) -> Spec:
    """Bars; those of one place beside each other where a field tells them apart."""
    offset = {} if beside is None else {"xOffset": {"field": beside, "sort": series["color"]["scale"]["domain"]}}
    return {
        "height": height,
        "mark": {"type": "bar"},
        "encoding": {"x": x, "y": y, **offset, **series, "tooltip": tooltip},
    }


def points(x: Spec, y: Spec, series: Spec, tooltip: list[Spec], height: int = 360, size: int = 40) -> Spec:
    """Points in the plane."""
    mark = {"type": "point", "filled": True, "size": size, "opacity": 0.8}
    return {"height": height, "params": [ZOOM], "mark": mark,
            "encoding": {"x": x, "y": y, **series, "tooltip": tooltip}}  # fmt: skip


def heat(
    x: Spec, y: Spec, value: Spec, tooltip: list[Spec], rows: int, columns: int, top: float, low: float = 0.0,
    format: str = "", quiet: float = -1e300,
) -> Spec:  # fmt: skip
    """A matrix of cells, the darker the larger; with numbers above `quiet` in them where there is room.

    Depth is opacity, so that nothing is nothing on a light page and on a dark one.
    """
    scale = {"domain": [low, top if top > low else low + 1], "range": [0.03, 1], "clamp": True}
    cells: Spec = {"mark": {"type": "rect", "color": BLUE},
                   "encoding": {"opacity": {**value, "scale": scale, "legend": None}, "tooltip": tooltip}}  # fmt: skip
    layers: list[Spec] = [cells]
    if columns <= FEW and rows <= FEW:
        deep = low + 0.6 * (top - low)
        ink = {"condition": {"test": {"field": value["field"], "gt": deep}, "value": "white"}, "value": INK}
        text = {"transform": [{"filter": {"field": value["field"], "gt": quiet}}],
                "mark": {"type": "text", "fontSize": 10},
                "encoding": {"text": {"field": value["field"], **({"format": format} if format else {})}, "color": ink,
                             "tooltip": tooltip}}  # fmt: skip
        layers.append(text)
    height = min(24 * rows, 520) if rows <= FEW else 420
    if columns > FEW:
        x = {**x, "axis": {"labels": False, "ticks": False}}
    if rows > FEW:
        y = {**y, "axis": {"labels": False, "ticks": False}}
    return {"height": height, "encoding": {"x": x, "y": y}, "layer": layers}


def inline(spec: Spec) -> str:
    """JSON that can stand inside of a page's script: no tag can end it, whatever a text holds.

    >>> inline({"label": "</script>"})
    '{"label": "\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(spec, ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
