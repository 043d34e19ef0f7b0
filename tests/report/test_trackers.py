"""Records in TensorBoard and in MLflow: what their own readers find again. Without them, a clear refusal."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.commands import blobs, tiny, unskew
from unskew.experiments.records import history_of
from unskew.report import trackers
from unskew.report.trackers import metrics_of, plain


@pytest.fixture
def words(tmp_path) -> list:
    return ["run", *tiny(blobs(tmp_path / "blobs.npz")), "--out", tmp_path / "run"]


def records_in(folder: Path) -> list:
    return history_of(folder / "run" / "records.jsonl")


def test_what_is_not_known_or_not_installed_is_refused_before_any_work(words, tmp_path, monkeypatch):
    answer = unskew(*words, "--log", "tensorbored")
    assert "unknown tracker 'tensorbored': did you mean 'tensorboard'" in answer.err

    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(trackers, "importlib", SimpleNamespace(import_module=missing))
    for name in ("tensorboard", "mlflow"):
        answer = unskew(*words, "--log", name)
        assert answer.code == 2
        assert f"--log {name} needs the package {name}" in answer.err
        assert "pip install 'unskew[log]'" in answer.err
    assert "leave it out, or --seeds" in unskew(*words, "--log", "mlflow", "--seeds", 2).err
    assert not (tmp_path / "run").exists()


def test_names_are_plain_and_numbers_finite(words, tmp_path):
    unskew(*words)
    for record in records_in(tmp_path):
        for name, value in metrics_of(record).items():
            assert isinstance(value, float)
            assert all(plain(piece) == piece for piece in name.split("/"))


def test_tensorboard_reads_its_files(words, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert unskew(*words, "--log", "tensorboard").code == 0
    again = unskew("run", "--resume", "--out", tmp_path / "run", "--log", "tensorboard")
    assert again.code == 0, again.err
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    found.Reload()
    scored = [record for record in records_in(tmp_path) if record.kind == "round"]
    shown = found.Scalars("test/accuracy")
    assert [event.step for event in shown] == [record.round for record in scored]
    assert [event.value for event in shown] == pytest.approx([record.accuracy for record in scored])
    (calibrated,) = [record for record in records_in(tmp_path) if getattr(record, "name", "") == "ffc"]
    assert found.Scalars("calibrated/ffc/accuracy")[-1].value == pytest.approx(calibrated.accuracy)


@pytest.mark.filterwarnings("ignore")  # of its libraries among each other
def test_mlflow_reads_its_run(words, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    for _ in range(2):  # the second time it is finished, and told again
        answer = unskew(*words, "--resume", "--log", "mlflow")
        assert answer.code == 0, answer.err
    client = mlflow.MlflowClient()
    place = client.get_experiment_by_name("unskew").experiment_id
    (run,) = client.search_runs([place])
    records = records_in(tmp_path)
    assert run.info.status == "FINISHED"
    assert run.data.params["rounds"] == json.dumps(records[0].experiment.rounds)
    assert run.data.tags["unskew.digest"] == records[0].digest
    shown = {one.step: one.value for one in client.get_metric_history(run.info.run_id, "test/accuracy")}
    assert shown == pytest.approx({record.round: record.accuracy for record in records if record.kind == "round"})
