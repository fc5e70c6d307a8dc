"""Only the newest job saves into a root; an earlier one that is still alive finds out and changes nothing."""

import json
import logging
import os

import pytest
from ranked import raises_on_ranks
from resumable import ResumableRun as Run

from booster_checkpoint.run import lease
from booster_checkpoint.run.checkpoint_root import LocalRun
from booster_checkpoint.storage import LocalLocation
from booster_core.errors import CheckpointError
from booster_testing import run_on_ranks


def listing(root):
    return {path.relative_to(root).as_posix(): path.stat().st_mtime_ns for path in root.rglob("*")}


def generation(root):
    return json.loads((root / lease.LEASE).read_text())["generation"]


class Job:
    """A run that takes itself for a process of its own."""

    tokens = 0

    def __init__(self, monkeypatch):
        Job.tokens += 1
        self.token, self._patch = f"job {Job.tokens}", monkeypatch
        self.run = Run()

    def do(self, call, *args, **options):
        self._patch.setattr(lease, "_token", lambda _pid: self.token)
        return getattr(self.run, call)(*args, **options)

    def save(self, root, step, **options):
        self.run.step = step
        self.do("save", root, **options)
        self.run.booster.wait()


@pytest.fixture
def make_job(monkeypatch):
    return lambda: Job(monkeypatch)


@pytest.mark.parametrize("use_async", [False, True])
def test_a_job_that_was_replaced_changes_nothing(use_async, make_job, tmp_path):
    old = make_job()
    old.save(tmp_path, 1)
    old.save(tmp_path, 2)
    new = make_job()
    new.do("load", tmp_path, resume=True)
    before = listing(tmp_path)
    with pytest.raises(CheckpointError, match=f"Another job saves into .* now: process {os.getpid()} of .*end it"):
        old.save(tmp_path, 3, keep_last=1, use_async=use_async)
    assert listing(tmp_path) == before
    new.save(tmp_path, 3, keep_last=1)
    with pytest.raises(CheckpointError, match="Another job saves into"):
        old.save(tmp_path, 4)
    assert generation(tmp_path) == 2


def test_the_newest_to_resume_wins_although_it_saves_later(make_job, tmp_path):
    make_job().save(tmp_path, 1)
    first, second = make_job(), make_job()
    first.do("load", tmp_path, resume=True)
    second.do("load", tmp_path, resume=True)
    with pytest.raises(CheckpointError, match="Another job saves into"):
        first.save(tmp_path, 2)
    second.save(tmp_path, 2)
    assert generation(tmp_path) == 3


@pytest.mark.parametrize("spelling", ["relative", "by a link", "by its parent"])
def test_a_lost_lease_is_lost_however_the_root_is_spelled(spelling, make_job, tmp_path, monkeypatch):
    root = tmp_path / "run"
    (tmp_path / "link").symlink_to(root)
    monkeypatch.chdir(tmp_path)
    spelled = {"relative": "run", "by a link": tmp_path / "link", "by its parent": root / ".." / "run"}[spelling]
    old, new = make_job(), make_job()
    old.save(root, 1)
    old.save(spelled, 2)
    new.do("load", root, resume=True)
    before = listing(root)
    with pytest.raises(CheckpointError, match="Another job saves into"):
        old.save(spelled, 3, keep_last=1)
    assert listing(root) == before


def test_a_load_alone_takes_nothing(make_job, tmp_path):
    training = make_job()
    training.save(tmp_path, 1)
    make_job().do("load", tmp_path)
    make_job().do("load", tmp_path, step="newest-whole")
    training.save(tmp_path, 2)


@pytest.mark.parametrize("moment", ["place", "write_latest"])
def test_a_job_that_is_replaced_during_its_commit(moment, make_job, tmp_path, monkeypatch, caplog):
    old, new = make_job(), make_job()
    old.save(tmp_path, 1)
    real = getattr(LocalRun, moment)

    def take_over_after(self, *args):
        placed = real(self, *args)
        monkeypatch.setattr(LocalRun, moment, real)
        new.do("load", tmp_path, resume=True)
        old.do("objects")
        return placed

    monkeypatch.setattr(LocalRun, moment, take_over_after)
    if moment == "place":  # what it put there is its own, and goes
        with pytest.raises(CheckpointError, match="Another job saves into"):
            old.save(tmp_path, 2, keep_last=1)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "lease.json", "step-00000001"]
        assert (tmp_path / "latest").read_text() == "step-00000001\n"
    else:  # its step is saved; it removes nothing any more
        with caplog.at_level(logging.WARNING):
            old.save(tmp_path, 2, keep_last=1)
        assert (tmp_path / "step-00000001" / "manifest.json").exists()
        assert "Another job saves into" in caplog.text


@pytest.mark.parametrize("content", ["", "{", "[]", '{"generation": "x"}', "[" * 100_000])
def test_a_damaged_lease_is_taken(content, make_job, tmp_path):
    make_job().save(tmp_path, 1)
    (tmp_path / lease.LEASE).write_text(content)
    make_job().save(tmp_path, 2)
    assert generation(tmp_path) == 1


def test_a_lease_that_was_removed_is_taken_again(make_job, tmp_path):
    job = make_job()
    job.save(tmp_path, 1)
    (tmp_path / lease.LEASE).unlink()
    job.save(tmp_path, 2)
    assert generation(tmp_path) == 1


def test_boosters_of_one_process_are_one_job(tmp_path):
    first, second = Run(), Run()
    for step, run in enumerate((first, second, first, second)):
        run.step = step
        run.save(tmp_path)
    assert generation(tmp_path) == 1


def test_a_child_process_is_another_job(tmp_path):
    Run().save(tmp_path)
    mine = json.loads((tmp_path / lease.LEASE).read_text())["token"]
    (theirs,) = run_on_ranks(save_and_tell, 1, str(tmp_path))
    assert theirs != mine
    assert generation(tmp_path) == 2


def save_and_tell(root):
    from pathlib import Path

    run = Run()
    run.step = 1
    run.save(root)
    return json.loads((Path(root) / lease.LEASE).read_text())["token"]


def test_what_cannot_be_written_to_is_still_resumed_from(tmp_path, monkeypatch, caplog):
    Run().save(tmp_path)
    monkeypatch.setattr(lease, "_token", lambda _pid: "another job")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(LocalLocation, "write_bytes", refuse)
    with caplog.at_level(logging.WARNING):
        assert Run().load(tmp_path, resume=True).step == 0
    assert "can be loaded from, but not saved into" in caplog.text


@raises_on_ranks(CheckpointError, "process 3 of 'other' .job 7", 2)
def test_every_rank_is_told(tmp_path):
    root = str(tmp_path)
    from booster_core.ranks.coordinator import DistCoordinator

    run = Run()
    run.save(root)
    if DistCoordinator().rank == 0:
        from pathlib import Path

        (Path(root) / lease.LEASE).write_text('{"generation": 7, "token": "t", "host": "other", "pid": 3}')
    run.step = 1
    run.save(root)
