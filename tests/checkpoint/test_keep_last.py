"""Old steps that cannot be removed: saves go on, half a step is never loaded, and the next save tries again."""

import contextlib
import errno
import logging
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
from folder_storage import FolderStorage
from resumable import ResumableRun as Run

from booster_checkpoint.run.checkpoint_root import open_run
from booster_core.errors import CheckpointError


def names_in(root):
    return sorted(path.name for path in root.iterdir())


def save(root, step, keep_last=1, **options):
    run = Run()
    run.step = step
    run.save(root, keep_last=keep_last, **options)
    run.booster.wait()


def load(root, step="latest"):
    return Run(seed=1).load(root, step=step).step


@pytest.fixture
def busy_files(monkeypatch):
    """Removing a folder fails halfway, as where a network file system keeps a file that is still open."""
    real, is_busy = shutil.rmtree, [True]

    def rmtree(path, ignore_errors=False, **options):
        if not is_busy[0] or ".step-" not in Path(path).name:
            return real(path, ignore_errors=ignore_errors, **options)
        (Path(path) / "training_state.json").unlink(missing_ok=True)
        if not ignore_errors:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        return None

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    return is_busy


@pytest.mark.parametrize("use_async", [False, True])
def test_step_that_cannot_be_removed_fails_no_save(use_async, busy_files, tmp_path, caplog):
    for step in (1, 2, 3):
        save(tmp_path, step, use_async=use_async)
    shown = [name for name in names_in(tmp_path) if not name.startswith(".")]
    assert shown == ["latest", "lease.json", "step-00000003"]
    assert len(names_in(tmp_path)) == 5, "halves of two steps are left, under hidden names"
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert messages
    assert all("could not be removed" in message and "busy" in message for message in messages)
    assert load(tmp_path) == 3
    with pytest.raises(CheckpointError, match="There is no step 2"):
        load(tmp_path, 2)
    busy_files[0] = False
    save(tmp_path, 4)
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
    save(tmp_path, 1)
    with step_that_stays(1):
        save(tmp_path, 2)
    assert "step-00000001' could not be removed" in caplog.text
    assert load(tmp_path) == 2
    assert load(tmp_path, 1) == 1
    save(tmp_path, 3)
    assert names_in(tmp_path) == ["latest", "lease.json", "step-00000003"]


def test_step_of_an_earlier_attempt_that_cannot_be_removed_does_not_stop_the_next(tmp_path, caplog):
    save(tmp_path, 1, keep_last=None)
    save(tmp_path, 2, keep_last=None)
    (tmp_path / "latest").write_text("step-00000001\n")  # the run went back, and comes to step 2 again
    with step_that_stays(2):
        save(tmp_path, 2, keep_last=None)
    assert "step-00000002' could not be removed" in caplog.text
    assert (tmp_path / "latest").read_text() == "step-00000002.1\n"
    assert load(tmp_path) == 2
    save(tmp_path, 3)
    assert names_in(tmp_path) == ["latest", "lease.json", "step-00000003"]


class StubbornStorage(FolderStorage):
    """Refuses to remove some files."""

    refused = ()

    def remove(self, url):
        if url.endswith(self.refused):
            msg = f"no right to delete {url}"
            raise PermissionError(errno.EACCES, msg)
        super().remove(url)


@pytest.mark.parametrize("refused", ["step-00000001", "step-00000001/manifest.json"])
def test_step_at_a_url_that_cannot_be_removed(refused, serve, caplog):
    root, stubborn = "ours://run", serve(StubbornStorage)
    save(root, 1)
    stubborn.refused = (refused,)
    save(root, 2)
    save(root, 3)
    assert "step-00000001' could not be removed" in caplog.text
    assert load(root) == 3
    is_whole = refused.endswith("json")
    assert open_run(root).steps() == ["step-00000001"] * is_whole + ["step-00000003"]
    stubborn.refused = ()
    save(root, 4)
    assert {path.partition("/")[0] for path in stubborn.list(root)} == {"latest", "lease.json", "step-00000004"}
