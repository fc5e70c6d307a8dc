"""Which steps stay: the last, each so many, and the best; what is best is known again after a restart."""

import contextlib
import errno
import logging
import math
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
from folder_storage import FolderStorage
from ranked import raises_on_ranks
from resumable import ResumableRun as Run

from booster_checkpoint.run.checkpoint_root import open_run
from booster_checkpoint.run.manifest import Manifest
from booster_core.checkpoint_io import StepOptions
from booster_core.errors import CheckpointError, ConfigError
from booster_core.ranks.coordinator import DistCoordinator

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
        run.booster.wait()


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
    run = Run()
    run.save(str(tmp_path), metric=float(DistCoordinator().rank), keep_best=1)


# ---- steps that cannot be removed: saves go on, half a step is never loaded, and the next save tries again


def names_in(root):
    return sorted(path.name for path in root.iterdir())


def load(root, step="latest"):
    return Run(seed=1).load(root, step=step).step


@pytest.mark.parametrize("use_async", [False, True])
def test_step_that_cannot_be_removed_fails_no_save(use_async, tmp_path, caplog):
    """Removing a folder fails halfway, as where a network file system keeps a file that is still open."""
    real = shutil.rmtree

    def rmtree(path, ignore_errors=False, **options):
        if ".step-" not in Path(path).name:
            real(path, ignore_errors=ignore_errors, **options)
            return
        (Path(path) / "training_state.json").unlink(missing_ok=True)
        if not ignore_errors:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    with mock.patch.object(shutil, "rmtree", rmtree):
        for step in (1, 2, 3):
            save(tmp_path, [None], step, use_async=use_async, keep_last=1)
    shown = [name for name in names_in(tmp_path) if not name.startswith(".")]
    assert shown == ["latest", "lease.json", "step-00000003"]
    assert len(names_in(tmp_path)) == 5, "halves of two steps are left, under hidden names"
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert messages
    assert all("could not be removed" in message and "busy" in message for message in messages)
    assert load(tmp_path) == 3
    with pytest.raises(CheckpointError, match="There is no step 2"):
        load(tmp_path, 2)
    save(tmp_path, [None], 4, keep_last=1)
    assert names_in(tmp_path) == ["latest", "lease.json", "step-00000004"]


@contextlib.contextmanager
def step_that_stays(step):
    """Let a step refuse to be renamed, and so to be removed."""
    real = Path.rename

    def rename(self, target):
        if self.name == f"step-{step:08}":
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(self))
        return real(self, target)

    with mock.patch.object(Path, "rename", rename):
        yield


def test_step_that_cannot_be_renamed_stays_whole_and_is_removed_later(tmp_path, caplog):
    save(tmp_path, [None], 1, keep_last=1)
    with step_that_stays(1):
        save(tmp_path, [None], 2, keep_last=1)
    assert "step-00000001' could not be removed" in caplog.text
    assert load(tmp_path) == 2
    assert load(tmp_path, 1) == 1
    save(tmp_path, [None], 3, keep_last=1)
    assert names_in(tmp_path) == ["latest", "lease.json", "step-00000003"]


def test_step_of_an_earlier_attempt_that_cannot_be_removed_does_not_stop_the_next(tmp_path, caplog):
    save(tmp_path, [None], 1)
    save(tmp_path, [None], 2)
    (tmp_path / "latest").write_text("step-00000001\n")  # the run went back, and comes to step 2 again
    with step_that_stays(2):
        save(tmp_path, [None], 2)
    assert "step-00000002' could not be removed" in caplog.text
    assert (tmp_path / "latest").read_text() == "step-00000002.1\n"
    assert load(tmp_path) == 2
    save(tmp_path, [None], 3, keep_last=1)
    assert names_in(tmp_path) == ["latest", "lease.json", "step-00000003"]


@pytest.mark.parametrize("refused", ["step-00000001", "step-00000001/manifest.json"])
def test_step_at_a_url_that_cannot_be_removed(refused, serve, caplog):
    root, storage = "ours://run", serve(FolderStorage)
    save(root, [None], 1, keep_last=1)
    real = storage.remove

    def remove(url):
        if url.endswith(refused):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), url)
        real(url)

    storage.remove = remove
    save(root, [None], 2, keep_last=1)
    save(root, [None], 3, keep_last=1)
    assert "step-00000001' could not be removed" in caplog.text
    assert load(root) == 3
    is_whole = refused.endswith("json")
    assert open_run(root).steps() == ["step-00000001"] * is_whole + ["step-00000003"]
    storage.remove = real
    save(root, [None], 4, keep_last=1)
    assert {path.partition("/")[0] for path in storage.list(root)} == {"latest", "lease.json", "step-00000004"}
