"""What people read fits their terminal, and no number is cut on the way."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.commands import Terminal, blobs, tiny, unskew
from helpers.pictures import MEAN, STD, folder_of, write_network
from unskew import errors
from unskew.calibration.selection import candidates
from unskew.cli import console
from unskew.statistics.moments import FeatureStats, Origin

WIDTHS = [40, 60, 80, 120]


def shown(thing, columns, monkeypatch):
    """What a terminal of some columns shows, without the codes for bold letters."""
    monkeypatch.setenv("COLUMNS", str(columns))
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    console.show(thing)
    monkeypatch.undo()
    text = re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue())
    assert max(map(len, text.splitlines())) <= columns
    return text


def wide_table(columns=9, rows=4):
    table = console.table_of("file", *(f"heading {number} of a rather long name" for number in range(columns)))
    for row in range(rows):
        table.add_row(f"folder/of/{row}/some_site_with_a_name.stats", *(f"{10**n * 3 + row:,}" for n in range(columns)))
    return table


@pytest.mark.parametrize("columns", [14, 25, *WIDTHS, 300])
def test_every_number_of_a_table_is_shown_whole(columns, monkeypatch):
    table = wide_table()
    words = shown(table, columns, monkeypatch).split()
    assert [word for row in table.rows for word in row[1:] if word not in words] == []


def test_columns_without_room_go_on_below_with_the_first_one_again(monkeypatch):
    table = console.table_of("class", *(f"site_{number}" for number in range(12)))
    table.add_row("ant", *(str(1000 + number) for number in range(12)))
    text = shown(table, 60, monkeypatch)
    pages = [line.split() for line in text.splitlines() if "ant" in line]
    assert len(pages) > 1
    assert [word for page in pages for word in page[1:]] == list(table.rows[0][1:])
    heads = [line.split() for line in text.splitlines() if "class" in line]
    assert [len(head) for head in heads] == [len(page) for page in pages]


def test_long_names_are_folded_and_not_lost(monkeypatch):
    table = console.table_of("class", "examples")
    name = "Staphylococcus-aureus-methicillin-resistant-of-the-third-kind"
    table.add_row(name, "112")
    text = shown(table, 40, monkeypatch)
    assert "112" in text.split()
    assert name in re.sub(r"\s", "", text.replace("112", ""))


def test_what_does_not_even_fit_as_two_columns_becomes_a_list(monkeypatch):
    table = console.table_of("head", "accuracy")
    table.add_row("a head", "61.25 -> 97.30 (+36.05)")
    assert "accuracy: 61.25 ->" in shown(table, 24, monkeypatch)


def test_a_pipe_gets_rows_whole(capsys):
    console.show(wide_table(columns=25))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "folder/of/2/some" in line)
    assert line.split()[1:] == [f"{10**n * 3 + 2:,}" for n in range(25)]


def test_a_row_of_another_length_is_a_mistake():
    with pytest.raises(ValueError, match="a row of 1 cells in a table of 2 columns"):
        console.table_of("head", "accuracy").add_row("old")


NAMES = tuple(f"a class with the number {number} and a name" for number in range(3))


@pytest.fixture(params=[11, 15])
def files(request, tmp_path, monkeypatch):
    """Statistics of many sites with long names, where examples count in the hundred thousands."""
    monkeypatch.chdir(tmp_path)
    made = []
    for number in range(request.param):
        count = torch.tensor([112_000.0 + number, 112.0, 7.0 * number])
        mean = torch.zeros(3, 2, dtype=torch.float64)
        stats = FeatureStats(count.double(), mean, torch.zeros(3, dtype=torch.float64), "pooled",
                             origin=Origin(labels=NAMES))  # fmt: skip
        made.append(f"a_folder_of_some_depth/site_of_the_hospital_number_{number}.stats")
        stats.save(made[-1])
    return made


@pytest.mark.parametrize("columns", WIDTHS)
def test_inspect_shows_all_counts_at_any_width(files, columns):
    answer = unskew("inspect", *files, columns=columns)
    assert answer.code == 0, answer.err
    assert max(map(len, answer.out.splitlines())) <= columns
    words = answer.out.split()
    for number in range(len(files)):
        assert words.count(f"{112_000 + number:,}") == 1
    assert words.count("112") == len(files)
    assert f"{sum(112_000 + number for number in range(len(files))):,}" in words


def test_what_inspect_leaves_out_it_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(13):
        FeatureStats.of(torch.ones(2, 1).double(), torch.tensor([0, number]), 25, "none").save(f"{number}/a.stats")
    answer = unskew("inspect", *(f"{number}/a.stats" for number in range(13)), columns=80)
    assert "Left out: the 25 classes of each of the 13 sites; --json has them." in answer.out
    answer = unskew("inspect", "0/a.stats", "1/a.stats", columns=80)
    assert "0/a.stats 1/a.stats" in " ".join(answer.out.split())  # which are not called a and a


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("kind", ["data", "methods", "calibrators"])
def test_lists_are_whole_at_any_width(kind, columns):
    narrow, wide = unskew("list", kind, columns=columns).out, unskew("list", kind).out
    assert max(map(len, narrow.splitlines())) <= columns
    assert "…" not in narrow
    for name in re.findall(r"^ (\w[\w.-]*)", wide, re.MULTILINE):
        assert name in narrow.replace("\n", " ") or len(name) > console.NARROW


@pytest.mark.sampled(2)
@pytest.mark.parametrize("columns", WIDTHS)
def test_a_partition_shows_all_counts_at_any_width(tmp_path, monkeypatch, columns):
    monkeypatch.chdir(tmp_path)
    data = blobs(tmp_path / "many.npz", classes=12, train=3000, side=24)
    options = ("--data", data, "--clients", 3, "--partition", "iid")
    narrow, wide = unskew("partition", *options, columns=columns).out, unskew("partition", *options).out
    (row,) = (line.split() for line in wide.splitlines() if re.match(" 1 ", line))
    assert row[1] == "1000"
    shown = [line.split()[1:] for line in narrow.splitlines() if re.match(" 1 ", line)]
    assert [word for part in shown for word in part] == row[1:]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("columns", WIDTHS)
def test_a_run_shows_all_its_numbers_at_any_width(tmp_path, monkeypatch, columns):
    monkeypatch.chdir(tmp_path)
    options = tiny(blobs(tmp_path / "blobs.npz"), calibrate="ffc,ccvr:samples=10:epochs=1,lda:shrinkage=0.5")
    answer = unskew("run", *options, "--out", "run", columns=columns)
    assert answer.code == 0, answer.err
    assert max(map(len, answer.out.splitlines())) <= columns
    change = r"\d+\.\d → \d+\.\d \([+-]\d+\.\d\)"
    assert len(re.findall(change, answer.out)) == 2 * 3  # accuracy and worst class of three calibrators


@pytest.mark.parametrize("columns", WIDTHS)
def test_scores_and_votes_are_whole_at_any_width(tmp_path, monkeypatch, columns):
    monkeypatch.chdir(tmp_path)
    write_network(tmp_path)
    folder_of(tmp_path / "a", 40, 1)
    model = ("--model", "net.py:build", "--weights", "global.safetensors", "--labels", "names.txt")
    collect = ("stats", *model, "--data", "a", *MEAN, *STD, "--out", "a.stats")
    propose = ("calibrate", *model[:4], "--stats", "a.stats", "--propose", "heads")
    score = ("evaluate", *model[:4], "--data", "a", "--heads", "heads", "--stats", "a.stats", "--out", "a.answer")
    vote = ("calibrate", *model[:4], "--stats", "a.stats", "--heads", "heads", "--validate", "a.answer", "--out", "b")
    for command in (collect, propose, score, vote):
        answer = unskew(*command, columns=columns)
        assert answer.code == 0, answer.err
        assert max(len(line) for line in answer.out.splitlines() if " unskew " not in line) <= columns
        if command in (score, vote):
            numbers = re.findall(r"(?<![\d.,])\d+\.\d\d(?!\d)", answer.out)
            heads = 1 + len(candidates("pooled", 1))  # the old one too
            assert len(numbers) == (3 if command is vote else 2) * heads  # votes of each site too


# ---------------------------------------------------------------------------------------------- characters that act

ACTING = {
    "escape": "\x1b[31mred\x1b[0m", "title": "\x1b]0;owned\x07", "return": "a\rerror", "line": "a\nnote: all is well",
    "tab": "a\tb", "bell": "\a", "delete": "a\x7f", "C1": "\x9b31m",
    "override": "\u202egnp.exe", "isolate": "\u2066a\u2069",
    "hidden": "a\u200bb\u200d\ufeff", "separator": "a\u2028b\u2029", "tag": "\U000e0041", "half": "a\udcffb",
}  # fmt: skip
MARKUP = ("[red]x[/red]", "[link=https://example.org]x[/link]", "[/]", ":smile:", "[bold]", "\\[x")


def harmless(text: str) -> bool:
    """Whether a terminal would only show it, once the codes for bold letters and bars are gone."""
    bare = re.sub(r"\x1b\[[\d;]*m", "", text)
    return all(one.isprintable() or one == "\n" for one in bare)


@pytest.mark.parametrize("kind", ACTING)
def test_characters_that_act_are_shown_as_escapes(kind, monkeypatch, capsys):
    text = ACTING[kind]
    seen = errors.printable(text)
    assert seen.isprintable()
    assert "\\" in seen
    table = console.table_of(text, text, title=text)
    table.add_row(text, text)
    for columns in (30, 200):
        assert harmless(shown(table, columns, monkeypatch))
        assert harmless(shown(text, columns, monkeypatch))
    console.tell(text)
    assert all(line.startswith("  ") for line in capsys.readouterr().err.splitlines()[1:])


@pytest.mark.parametrize("text", MARKUP)
def test_brackets_and_colons_mean_nothing(text, monkeypatch):
    table = console.table_of(text, text, title=text)
    table.add_row(text, text)
    assert shown(table, 200, monkeypatch).count(text) == 5
    assert text in shown(text, 200, monkeypatch)
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("COLUMNS", "200")
    with console.bar(text + "\x1b]0;x\x07", 3) as progress:
        progress(1)
    assert text in screen.getvalue()
    assert "\x1b]0" not in screen.getvalue()


def test_letters_of_all_languages_stay(monkeypatch):
    for text in ("Ähre", "犬と猫", "собака", "a\u00a0b", "🐶", "قط"):
        assert errors.printable(text) == text


def test_what_is_overlong_is_cut_in_the_middle(monkeypatch):
    table = console.table_of("h" * 10**5, "n")
    table.add_row("c" * 10**6, "12")
    text = shown(table, 120, monkeypatch)
    assert len(text) < 5000
    assert "more)" in text
    assert "12" in text.split()
    assert len(errors.printable("x" * 10**6)) <= errors.LINE + 20


def test_nothing_is_printed_but_by_the_console():
    """Whoever prints by themselves may print what acts."""
    source = Path(console.__file__).parent
    allowed = {"console.py", "workers.py"}  # the latter prints nothing, to flush what a method has printed
    found = [f"{path.name}: {line.strip()}" for path in source.rglob("*.py") if path.name not in allowed
             for line in path.read_text(encoding="utf-8").splitlines()
             if re.search(r"(?<![\w.>] )\bprint\(|Console\(|click\.echo|sys\.std(out|err)\.write", line)
             and not re.search(r">>>|print\(round|for print", line)]  # fmt: skip
    assert found == []


NASTY = tuple(f"{number}{text}" for number, text in enumerate(
    ["\x1b[31m", "\u202e", "\r", "[red]x[link=y]", "a\nnote: forged"]))  # fmt: skip


@pytest.fixture
def nasty(tmp_path, monkeypatch):
    """Sites whose classes, files and headers hold all that acts; and the files of a whole conversation."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\ndef build():\n    torch.manual_seed(0)\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 5))\n"
    )
    for site in ("a\x1b[2J", "b\u202e"):
        for kind, name in enumerate(NASTY):
            (tmp_path / site / name).mkdir(parents=True)
            for number in range(6):
                pixels = np.random.default_rng([len(site), kind, number]).integers(0, 255, (6, 6), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / site / name / f"{number}\x1b.png")
        (tmp_path / site / NASTY[0] / "broken\x1b.png").write_text("no picture")
    return tmp_path


def test_no_command_lets_them_through(nasty):
    a, b = "a\x1b[2J", "b\u202e"
    model, files = ("--model", "net.py:build"), [f"{a}.stats", f"{b}.stats"]
    heads, answers = "heads\x1b", ["a\x1b.answer", "b\x1b.answer"]
    sites = (*model, "--skip-damaged", "--data")
    collect = [("stats", *sites, site, "--out", out) for site, out in zip((a, b), files, strict=True)]
    answer = [("evaluate", *sites, site, "--heads", heads, "--stats", f"{site}.stats") for site in (a, b)]
    score = [(*command, "--out", out) for command, out in zip(answer, answers, strict=True)]
    worked = [
        *collect,
        ("inspect", *files),
        ("calibrate", *model, "--stats", *files, "--propose", heads),
        *score,
        ("calibrate", *model, "--stats", *files, "--heads", heads, "--validate", *answers, "--out", "new\x1b"),
        ("evaluate", "--model", "net.py:build", "--weights", "new\x1b", "--data", a, "--skip-damaged"),
        ("try", *model, "--sites", a, b, "--skip-damaged"),
    ]
    for command in worked:
        for columns in (None, 70):
            force = ("--force",) if "--out" in command or "--propose" in command else ()
            answer = unskew(*command, *force, columns=columns)
            assert answer.code == 0, answer.err
            assert harmless(answer.out + answer.err), answer
            assert not [line for line in answer.err.splitlines() if line.startswith("note: forged")]
    failing = [
        ("stats", *model, "--data", "c\x1b", "--out", "x"),
        ("stats", *model, "--data", a, "--out", files[0]),
        ("stats", "--model", "no\x1b", "--data", a, "--out", "x"),
        ("inspect", f"{a}/{NASTY[0]}/broken\x1b.png"),
        ("calibrate", *model, "--stats", f"{a}/{NASTY[0]}/broken\x1b.png", "--out", "x"),
        ("calibrate", *model, "--stats", *files, "--prior", "x\x1b", "--out", "x"),
        ("calibrate", *model, "--stats", *files, "--calibrator", "x\x1b", "--out", "x"),
        ("evaluate", *model, "--data", a),
        ("task", "--model", "x\x1b", "--image-size", 8, "--channels", 1),
        ("run", "--data", "x\x1b"), ("run", "x\x1b.toml"), ("list", "x\x1b"), ("table", "x\x1b"), ("x\x1b",),
        ("partition", "--data", a, "--image-size", "6", "--clients", "2"),
    ]  # fmt: skip
    for command in failing:
        answer = unskew(*command)
        assert answer.code in (1, 2), (command, answer)
        assert harmless(answer.out + answer.err), answer


def test_texts_in_headers_do_not_act(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    origin = Origin(layer="\x1b[31mlayer", preparation="\x1b[2Jprepared", labels=("a\x1b", "b\u202e"))
    stats = FeatureStats.of(torch.eye(2).double(), torch.tensor([0, 1]), 2, "pooled")
    replace(stats, origin=origin).save("a.stats")
    replace(stats, origin=replace(origin, layer="\x1b]0;x\x07")).save("b.stats")
    inspect = [("inspect", "a.stats"), ("inspect", "a.stats", "b.stats"), ("inspect", "a.stats", "--json")]
    for command in (*inspect, ("calibrate", "--model", "cnn", "--stats", "a.stats", "b.stats", "--out", "x")):
        answer = unskew(*command)
        assert harmless(answer.out + answer.err)
        assert "x1b" in answer.out + answer.err or "u001b" in answer.out


@pytest.mark.slow
def test_many_classes_are_inspected_in_seconds_and_shown_on_a_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    many = 90_000
    FeatureStats.of(torch.ones(many, 1).double(), torch.arange(many) // 2, many, "none").save("a.stats")
    begin = time.monotonic()
    answer = unskew("inspect", "a.stats")
    assert time.monotonic() - begin < 10
    assert answer.code == 0
    assert len(answer.out) < 30_000
    assert "Left out: the 89,800 classes with the fewest examples; --json has them." in answer.out
    assert "and 44,980 more: a new classifier can't know it" in answer.out
    assert len(json.loads(unskew("inspect", "a.stats", "--json").out)["table"]) == many
