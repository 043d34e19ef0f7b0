"""An experiment is a value: checked when it is made, the same from every source, and known by its digest."""

from dataclasses import FrozenInstanceError, asdict, fields, replace

import pytest

from unskew import DataError, Experiment, UsageError
from unskew.experiments.experiment import read_toml, types_of_fields
from unskew.experiments.resolve import calibrators_of


def test_every_field_has_a_sentence_and_a_plain_type() -> None:
    assert [item.name for item in fields(Experiment)] == list(types_of_fields())
    for item in fields(Experiment):
        assert item.metadata["help"]
        assert types_of_fields()[item.name][0] in (int, float, bool, str)


def test_an_experiment_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Experiment().rounds = 3  # type: ignore[misc]


def test_the_digest_tells_experiments_apart() -> None:
    changes = {int: 7, float: 0.25, bool: True, str: "other"}
    changed = [replace(Experiment(), **{name: changes[kind]}) for name, (kind, _) in types_of_fields().items()]
    assert len({experiment.digest for experiment in [Experiment(), *changed]}) == len(changed) + 1
    assert Experiment(alpha=1).digest == Experiment(alpha=1.0).digest
    assert Experiment(**asdict(Experiment(seed=3))).digest == Experiment(seed=3).digest


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("rounds", "3", "rounds is '3', which is not a whole number"),
        ("rounds", 3.0, "rounds is 3.0, which is not a whole number"),
        ("rounds", True, "rounds is True, which is not a whole number"),
        ("rounds", None, "rounds is None, which is not a whole number"),
        ("lr", "0.1", "lr is '0.1', which is not a finite number"),
        ("lr", float("nan"), "lr is nan, which is not a finite number"),
        ("alpha", float("inf"), "alpha is inf, which is not a finite number"),
        ("central", 1, "central is 1, which is not true or false"),
        ("data", 3, "data is 3, which is not a text"),
        ("rounds", 0, "rounds is 0: it must be at least 1, and whole"),
        ("clients", -1, "clients is -1: it must be at least 1, and whole"),
        ("batch", 0, "batch is 0: it must be at least 1, and whole"),
        ("steps", 0, "steps is 0: it must be at least 1, and whole"),
        ("evaluate_every", 0, "evaluate_every is 0: it must be at least 1, and whole"),
        ("lr", -0.1, "lr is -0.1: it must be 0 or more"),
        ("threads", -1, "threads is -1: it must be 0 or more"),
        ("momentum", 1, "momentum is 1.0: it must be at least 0 and below 1"),
        ("fraction", 0, "fraction is 0.0: it must be above 0 and at most 1"),
        ("fraction", 1.1, "fraction is 1.1: it must be above 0 and at most 1"),
        ("alpha", 0, "alpha is 0.0: it must be above 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(name, value, words) -> None:
    with pytest.raises(UsageError) as caught:
        Experiment(**{name: value})
    assert str(caught.value) == words


def test_a_toml_file(tmp_path) -> None:
    path = tmp_path / "my.toml"
    path.write_text('alpha = 1\nmethod = "fedprox:mu=0.1"\ncut-seed = 4\nevaluate_every = 2\ncentral = true\n')
    expected = {"alpha": 1.0, "method": "fedprox:mu=0.1", "cut_seed": 4, "evaluate_every": 2, "central": True}
    assert read_toml(path) == expected
    assert Experiment.read(path) == Experiment(**expected)


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("alhpa = 1", UsageError, "unknown option 'alhpa': did you mean 'alpha'? There are: data, label_set"),
        ('rounds = "two"', UsageError, "rounds is 'two', which is not a whole number"),
        ("[rounds]\nnumber = 2", UsageError, "rounds is {'number': 2}, which is not a whole number"),
        ("fraction = 2", UsageError, "fraction is 2.0: it must be above 0 and at most 1"),
        ("alpha 1", DataError, "not TOML"),
    ],
)
def test_a_bad_toml_file_is_refused_by_name(tmp_path, text, kind, words) -> None:
    path = tmp_path / "my.toml"
    path.write_text(text)
    with pytest.raises(kind) as caught:
        Experiment.read(path)
    assert str(caught.value).startswith(f"{path}: {words}")


def test_a_missing_toml_file_is_refused(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"no\.toml: there is no such file"):
        Experiment.read(tmp_path / "no.toml")


def test_calibrators_by_name() -> None:
    assert calibrators_of(Experiment(calibrate="none")) == calibrators_of(Experiment(calibrate="")) == {}
    made = calibrators_of(Experiment(calibrate=" ffc, ffc:ridge=1 ,oracle, ffc,none"))
    assert list(made) == ["ffc", "ffc:ridge=1", "oracle"]


def test_the_help_of_an_option_names_all_that_its_registry_has() -> None:
    """The help must not need torch, so it can't be made from the registries; but it must not lag behind them."""
    from unskew.data.partition import partitions
    from unskew.methods.optim import schedules
    from unskew.training.engines.lanes.step import LAYOUTS, precisions
    from unskew.training.engines.registry import engines
    from unskew.training.personal import ways

    registries = {"partition": partitions, "schedule": schedules, "engine": engines, "precision": precisions,
                  "personal": ways, "lane_layout": LAYOUTS}  # fmt: skip
    for name, registry in registries.items():
        about = Experiment.__dataclass_fields__[name].metadata["help"]
        assert [key for key in registry if key not in about] == [], name
