"""Which steps stay: the last, each so many, and the best; what is best is known again after a restart."""

import logging
import math

import pytest
from ranked import raises_on_ranks
from resumable import ResumableRun as Run

from booster_checkpoint.run.manifest import Manifest
from booster_core.checkpoint_io import StepOptions
from booster_core.errors import ConfigError

NAN = math.nan


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({}, {1, 2, 3, 4, 5, 6, 7, 8}),
        ({"keep_last": 2}, {7, 8}),
        ({"keep_every": 3}, {3, 6, 8}),
        ({"keep_last": 2, "keep_every": 3}, {3, 6, 7, 8}),
        ({"keep_best": 1}, {2, 8}),
        ({"keep_best": 3}, {2, 4, 5, 8}),  # of equals the later one
        ({"keep_best": 9}, {1, 2, 3, 4, 5, 7, 8}),
        ({"keep_last": 1, "keep_every": 4, "keep_best": 1}, {2, 4, 8}),
    ],
)
def test_a_step_that_any_rule_keeps_stays(rules, kept):
    metrics = {1: 3.0, 2: 0.5, 3: 2.0, 4: 1.0, 5: 1.0, 7: NAN}
    assert StepOptions(step=8, **rules).kept(range(1, 9), metrics) == kept


@pytest.mark.parametrize("name", ["keep_last", "keep_every", "keep_best"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
def test_rules_are_positive_numbers(name, value):
    with pytest.raises(ConfigError, match=f"`{name}="):
        StepOptions(step=8, **{name: value}).check()


def steps_in(root):
    return sorted(int(path.name.partition("-")[2]) for path in root.glob("step-*"))


def save(root, metrics, start=1, **rules):
    run = Run()  # a new process would know no more
    for run.step, metric in enumerate(metrics, start):
        run.save(root, metric=metric, **rules)


def test_best_steps_stay_through_a_restart(tmp_path):
    save(tmp_path, [3.0, 1.0, 2.0], keep_last=1, keep_best=1)
    assert steps_in(tmp_path) == [2, 3]
    save(tmp_path, [2.5, 0.5, None, NAN, math.inf], start=4, keep_last=1, keep_best=2)
    assert steps_in(tmp_path) == [2, 5, 8]
    assert Manifest.read(tmp_path / "step-00000002").facts["metric"] == 1.0


def test_multiples_stay(tmp_path):
    save(tmp_path, [None] * 5, keep_last=1, keep_every=2)
    assert steps_in(tmp_path) == [2, 4, 5]


def test_steps_of_a_run_that_went_back_are_neither_best_nor_removed(tmp_path):
    save(tmp_path, [1.0], start=9)
    save(tmp_path, [3.0, 2.0, 4.0], keep_best=1)
    assert steps_in(tmp_path) == [2, 3, 9]


def test_a_step_whose_manifest_cannot_be_read_stays(tmp_path, caplog):
    save(tmp_path, [1.0, 2.0])
    (tmp_path / "step-00000002" / "manifest.json").write_text("{")
    with caplog.at_level(logging.WARNING):
        save(tmp_path, [0.5], start=3, keep_best=1)
    assert steps_in(tmp_path) == [2, 3]
    assert "step-00000002' is kept, since it is not known how good it is" in caplog.text


@pytest.mark.parametrize("metric", ["good", [1.0, 2.0], {}])
def test_a_metric_is_a_number(metric, tmp_path):
    with pytest.raises(ConfigError, match="`metric="):
        save(tmp_path / "run", [metric])
    assert not (tmp_path / "run").exists()


@raises_on_ranks(ConfigError, "Ranks disagree about `metric`: 0.0 on rank 0", 2)
def test_ranks_agree_about_the_metric(tmp_path):
    root = str(tmp_path)
    from booster_core.ranks.coordinator import DistCoordinator

    run = Run()
    run.save(root, metric=float(DistCoordinator().rank), keep_best=1)
