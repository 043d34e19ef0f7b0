"""The demo's report in a real browser: `make test-browser`, which needs Chromium."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.browser import Browser, chromium
from helpers.commands import unskew
from unskew.report.charts import Figure, axis, bars, by, hover, names
from unskew.report.page import Section, html_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="there is no Chromium: make test-browser installs it"),
]
SHOTS = os.environ.get("UNSKEW_SHOTS")  # a folder to keep the pictures in, for eyes


@pytest.fixture(scope="module")
def shots(tmp_path_factory) -> Path:
    folder = Path(SHOTS) if SHOTS else tmp_path_factory.mktemp("shots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "run"
    answer = unskew("demo", "--out", out, plots=True)
    assert answer.code == 0, answer.err
    assert f"{out / 'report.html'}: the report" in answer.out
    return out / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        opened = Browser(Path(home))
        yield opened
        opened.close()


def ink(path: Path) -> float:
    """How much a picture varies."""
    with Image.open(path) as image:
        return float(np.asarray(image.convert("L")).std())


TOOLTIP = "new Promise(done => setTimeout(() => done(document.getElementById('vg-tooltip-element')?.innerText), 400))"
SIZES = {"desktop": {}, "phone": {"width": 390, "height": 800, "phone": True}, "dark": {"dark": True}}


@pytest.mark.parametrize("kind", SIZES)
def test_every_section_is_seen_and_nothing_complains(kind, report, browser, shots):
    browser.show(report, **SIZES[kind])
    assert browser.complaints() == []
    sections = browser.value("[...document.querySelectorAll('section')].map(one => one.id)")
    assert len(sections) == 11
    for name in sections:
        assert browser.value(f"document.getElementById('{name}').getBoundingClientRect().height") > 80
        assert ink(browser.screenshot(shots / f"{kind}-{name}.png", f"#{name}")) > 5
    drawn = browser.value(
        "[...document.querySelectorAll('figure')].map(one => one.querySelectorAll('svg path').length)"
    )
    assert len(drawn) >= 20
    assert min(drawn) > 3
    width = browser.value("document.documentElement.scrollWidth")
    assert width <= (390 if kind == "phone" else 1280)  # nothing to scroll sideways


def test_dark_is_dark_and_print_is_light(report, browser, shots):
    browser.show(report, dark=True)
    dark = browser.screenshot(shots / "dark-head.png", "header")
    browser.media(dark=False, kind="print")
    printed = browser.screenshot(shots / "print-head.png", "header")
    with Image.open(dark) as first, Image.open(printed) as second:
        assert np.asarray(first.convert("L")).mean() < 80
        assert np.asarray(second.convert("L")).mean() > 180
    assert browser.printed().count(b"/Type /Page\n") >= 3


def test_a_chart_tells_its_numbers_and_zooms(report, browser):
    browser.show(report)
    browser.value("document.getElementById('figure-labels').scrollIntoView({block: 'center'})")
    where = browser.value(
        "(r => [r.x + r.width / 2, r.y + r.height / 2])"
        "(document.querySelector('#figure-labels .mark-rect path').getBoundingClientRect())"
    )
    browser.point_at(*where)
    told = browser.value(TOOLTIP)
    assert "examples" in told
    assert "client" in told
    browser.value("document.getElementById('figure-tsne-truth').scrollIntoView({block: 'center'})")
    place = "document.querySelector('#figure-tsne-truth .mark-symbol path').getAttribute('transform')"
    before = browser.value(place)
    x, y = browser.value(
        "(r => [r.x + r.width / 2, r.y + r.height / 2])"
        "(document.querySelector('#figure-tsne-truth svg').getBoundingClientRect())"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=-200, modifiers=8)  # shift
    assert browser.value(f"new Promise(done => setTimeout(() => done({place}), 400))") != before


def test_an_evil_name_runs_nothing(browser, tmp_path):
    evil = "</script><script>window.evil = 1</script><img src=x onerror='window.evil = 1'>"
    rows = [{"class": evil, "value": 1.0}, {"class": "b", "value": 2.0}]
    shown = bars(names("class", [evil, "b"]), axis("value"), by("class", [evil, "b"]), hover("class", "value"))
    path = tmp_path / "evil.html"
    path.write_text(html_of(evil, evil, [Section(evil, [Figure("evil", evil, evil, rows, shown)])], evil))
    browser.show(path)
    bar = browser.value(
        "(r => [r.x + r.width / 2, r.y + r.height / 2])"
        "(document.querySelector('.mark-rect path').getBoundingClientRect())"
    )
    browser.point_at(*bar)
    told = browser.value(TOOLTIP)
    assert "script" in told
    assert browser.value("window.evil === undefined")
    assert browser.complaints() == []
