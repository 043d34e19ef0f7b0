"""The short form of `make test-adversary`: some of each attack, in seconds, and whether the judge can tell."""

import os
from pathlib import Path

import pytest

from adversary import corpus, forging, judging, kills, laws, malicious, reading, report, strangers

MUTANTS = 60  # one of each file
OF_THE_ISSUE = [  # what was accepted once, and what it cost
    "one example with scatter 1e9 I", "one example at 1e6", "a loader that forgot / 255", "two classes swapped",
    "negative definite moments under a privacy header", "held-out moments larger than the whole",
    "its own data x 1e13", "a replay with another producer", "the same site in another precision",
    "all origin fields are null", "a huge image as what the model takes", "two sites collude to swap two classes",
]  # fmt: skip
SEED = 16


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNSKEW_DATA", str(tmp_path))  # so that no log or cache of the user's is touched


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> corpus.Corpus:
    here = Path.cwd()
    folder = tmp_path_factory.mktemp("corpus")
    os.chdir(folder)
    try:
        return corpus.made(folder / "files")
    finally:
        os.chdir(here)


@pytest.mark.slow
def test_what_is_forged_without_a_lie_is_the_same_file(files) -> None:
    for original in files.originals:
        raw = original.path.read_bytes()
        if original.path.suffix in (".stats", ".safetensors"):
            file = forging.read(raw)
            assert forging.resealed(file).metadata == file.metadata, original.path
            assert forging.read(forging.written(file)) == file
        if original.path.suffix == ".stats":
            assert laws.broken(raw) is None, original.path


@pytest.mark.parametrize("mutants", [MUTANTS // 8, pytest.param(MUTANTS, marks=pytest.mark.exhaustive)])
def test_mutated_files_are_refused_by_a_sentence(files, mutants) -> None:
    numbers = list(range(0, MUTANTS, MUTANTS // mutants))
    found = list(judging.verdicts(files, SEED, numbers))
    bad = [verdict for verdict in found if verdict.bad]
    assert not bad, report.details(report.Findings(SEED, 0, 1, found, [], []))
    assert {verdict.number for verdict in found} == set(numbers)
    assert sum(verdict.verdict == "refused" for verdict in found) > mutants  # each has one reader or several


def test_a_model_that_names_a_file_does_not_run_it(files, tmp_path, monkeypatch) -> None:
    original = next(one for one in files.originals if one.path.name == "model.safetensors")
    forged = forging.read(original.path.read_bytes())
    forged.set("model", {**forged.get("model"), "spec": "canary.py:build"})
    (tmp_path / "model.safetensors").write_bytes(forging.written(forging.resealed(forged)))
    (tmp_path / "canary.py").write_text(judging.CANARY)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(reading.Refused, match=r"canary\.py"):
        original.readers[0].read(Path("model.safetensors"))
    assert not Path("canary").exists()


def test_a_site_that_lies_is_refused_or_named(files, tmp_path) -> None:
    scene = malicious.Scene(files.federation, tmp_path / "scene")
    assert scene.honest > 94
    for name in OF_THE_ISSUE:
        outcome = scene.outcome(name, malicious.ATTACKS[name](scene))
        assert outcome.ended in ("refused", "named"), outcome
        assert "liar_" in outcome.said, outcome


@pytest.mark.slow
def test_honest_sites_pass_however_odd(files, tmp_path) -> None:
    scene = malicious.Scene(files.federation, tmp_path / "scene")
    assert [(one.attack, one.said) for one in malicious.honest(scene) if one.ended != "accepted"] == []


@pytest.mark.slow
def test_strangers_replays_and_lying_answers_are_refused_or_named(files, tmp_path) -> None:
    found = list(strangers.tricks(strangers.staged(files.federation, tmp_path / "keys")))
    found += strangers.unsigned_answers(files.federation, tmp_path / "answers", flips=10)
    assert len(found) > 18
    assert [(one.attack, one.said) for one in found if one.lost] == []


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path) -> None:
    known: dict = {}
    found = []
    for number in (5, 6, 8):  # of the engine sequential
        found.append(kills.trial(number, SEED, tmp_path, known))
        if found[-1].kills:
            break
    assert found[-1].kills
    assert [trial.failures for trial in found if trial.failures] == []
