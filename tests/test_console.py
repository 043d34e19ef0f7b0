"""What people read fits their terminal, and no number is cut on the way."""

import re

import pytest
import torch

from commands import Terminal, blobs, tiny, unskew
from pictures import MEAN, STD, folder_of, write_network
from unskew import console
from unskew.statistics import FeatureStats, Origin

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
    score = ("evaluate", *model[:4], "--data", "a", "--heads", "heads", "--out", "a.answer")
    vote = ("calibrate", *model[:4], "--stats", "a.stats", "--heads", "heads", "--validate", "a.answer", "--out", "b")
    for command in (collect, propose, score, vote):
        answer = unskew(*command, columns=columns)
        assert answer.code == 0, answer.err
        assert max(len(line) for line in answer.out.splitlines() if " unskew " not in line) <= columns
        if command in (score, vote):
            numbers = re.findall(r"(?<![\d.,])\d+\.\d\d(?!\d)", answer.out)
            assert len(numbers) == 2 * 4  # of four heads
