"""Federations on a SuperLink and SuperNodes on loopback: when all goes well, and what comes of sites that fail."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helpers.deployments import SITES, Deployment, Run, deployed, ended, wait_for

pytest.importorskip("flwr", reason="needs Flower: make test-flower")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Iterator[Deployment]:
    """Three sites without TLS."""
    with deployed(tmp_path_factory.mktemp("plain")) as deployment:
        deployment.start(*SITES)
        yield deployment


@pytest.fixture(scope="module")
def undisturbed(plain) -> Run:
    """A run of two rounds of SCAFFOLD in which nothing happens."""
    return plain.run(method="scaffold", rounds=2)


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_run_ends_well_and_writes_down_who_took_part(undisturbed):
    assert undisturbed.status.well, undisturbed.status
    assert list(undisturbed.phases) == [
        "sites", "examples", "round 1", "round 2", "statistics", "answers", "scores of test",
    ]  # fmt: skip
    assert all(phase.answered == [*SITES] and not phase.absent for phase in undisturbed.phases.values())
    assert undisturbed.ended.well
    assert undisturbed.ended.absent == {}


def test_replies_that_can_not_be_used_are_named_and_left_out(plain):
    """One fault after the other, of one site; the two others go on to the end."""
    run = plain.run(
        "c round-1 nan, c round-2 shapes, c round-3 error, c round-4 crash, c statistics other-weights",
        rounds=5, require="2",
    )  # fmt: skip
    assert run.status.well, run.status
    why = {name: phase.absent.get("c") for name, phase in run.phases.items()}
    assert "NaN" in why["round 1"]
    assert "upload" in why["round 2"]
    assert "the disk is full" in why["round 3"]
    assert "no reply within 60 s" in why["round 4"]  # Flower does not say that an app's process has died
    assert why["round 5"] is None
    assert "collected with other weights" in why["statistics"]
    assert all(phase.answered[:2] == ["a", "b"] for phase in run.phases.values())
    assert 0.05 < run.ended.share_absent < 0.8
    assert run.ended.absent["c"].count("round") >= 4


def test_where_all_are_required_one_that_fails_ends_the_run_and_its_exit_code_says_so(plain):
    run = plain.run("b round-1 error")
    assert run.status.status == "finished:failed"
    assert not run.ended.well
    assert "b" in run.ended.why
    assert "the disk is full" in run.ended.why


def test_a_site_that_never_replies_is_waited_for_until_the_deadline(plain):
    run = plain.run("c statistics waits", require="2", deadline=40.0)
    assert run.status.well, run.status
    assert "no reply within 40 s" in run.phases["statistics"].absent["c"]
    assert 38 < run.phases["statistics"].seconds < 60
    plain.kill("c")  # it still waits
    plain.start("c")


@pytest.mark.parametrize("phase", ["round-1", "statistics", "answers"])
def test_a_site_that_is_killed_is_named(plain, phase):
    running, folder = plain.begin(f"c {phase} waits", require="2", deadline=40.0)
    wait_for(folder / f"c-{phase}")
    plain.kill("c")
    run = ended(running, folder / "out")
    plain.start("c")
    assert run.status.well, run.status
    assert "c" in run.phases[phase.replace("-", " ")].absent
    assert "c" in run.ended.absent


def test_a_site_that_is_killed_and_started_again_goes_on_where_it_was(plain, undisturbed, tmp_path):
    """What SCAFFOLD keeps at the site lies in a folder; the result is that of a run in which nothing happened."""
    plain.kill("c")
    plain.start("c", state=str(tmp_path / "state"))
    running, folder = plain.begin("c round-2 waits", method="scaffold", rounds=2, deadline=150.0)
    wait_for(folder / "c-round-2")
    plain.kill("c")
    plain.start("c", state=str(tmp_path / "state"))
    run = ended(running, folder / "out")
    assert run.status.well, run.status
    assert run.ended.absent == {}
    assert same(run.weights(), undisturbed.weights())


def test_of_two_nodes_with_one_name_neither_is_believed(plain):
    plain.local.start_node("c2", {"site": "c", "partition-id": 2, "num-partitions": 3})
    plain.local.wait_for_nodes()
    try:
        run = plain.run("a round-1 is-slow", require="2", rounds=2, my_claim=5.0)
    finally:
        plain.kill("c2")
    assert run.status.well, run.status
    assert "both say that they are c" in run.phases["round 2"].absent["c"]


def test_a_run_goes_on_after_its_superlink_has_died(plain, undisturbed, tmp_path):
    """A SuperLink forgets its runs and its nodes; the server's folder and those of the sites hold all that it takes."""
    for site in SITES:
        plain.kill(site)
    plain.start(*SITES, state=str(tmp_path))
    running, folder = plain.begin("b round-2 waits", method="scaffold", rounds=2)
    wait_for(folder / "b-round-2")
    plain.local.superlink.kill()
    plain.local.superlink.wait(10)
    assert not running.status(5).well
    for site in SITES:
        plain.kill(site)
    plain.local.start_superlink(port=plain.local.port)
    plain.start(*SITES, state=str(tmp_path))
    run = plain.run(method="scaffold", rounds=2, out=str(folder / "out"), resume=True)
    assert run.status.well, run.status
    assert run.ended.absent == {}
    assert same(run.weights(), undisturbed.weights())


# ---------------------------------------------------------------------------------------------- TLS and keys


@pytest.fixture(scope="module")
def secure(tmp_path_factory) -> Iterator[Deployment]:
    """Three sites with TLS and a registered key each."""
    with deployed(tmp_path_factory.mktemp("secure"), secure=True) as deployment:
        deployment.start(*SITES)
        yield deployment


def test_with_tls_and_keys_the_result_is_the_same(secure, undisturbed):
    run = secure.run(method="scaffold", rounds=2)
    assert run.status.well, run.status
    assert same(run.weights(), undisturbed.weights())
    assert same(run.weights("calibrated"), undisturbed.weights("calibrated"))


def test_a_node_without_a_registered_key_is_refused(secure, tmp_path):
    node = secure.local.start_node("d", {"partition-id": 0, "num-partitions": 3}, registered=False)
    run = secure.run(sites="a,b,c,d", patience=15.0)
    assert run.status.status == "finished:failed"
    assert "d: missing (no SuperNode of that name within 15 s)" in run.ended.why
    log = Path(node.log).read_text()
    assert "SuperNode ID" not in log
    secure.kill("d")


def test_a_node_can_not_take_the_name_of_another(secure):
    secure.kill("c")
    secure.local.start_node("e", {"site": "c", "partition-id": 2, "num-partitions": 3})
    secure.local.wait_for_nodes()
    run = secure.run(patience=20.0)
    assert run.status.status == "finished:failed"
    assert "registered as e, but it says that it is c" in str(run.records)
