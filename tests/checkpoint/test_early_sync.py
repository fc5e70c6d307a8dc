"""Files go to disk while they are written, and a disk that fails is told to who writes."""

from __future__ import annotations

import errno
import os

import pytest

from booster_checkpoint.save import in_place
from booster_checkpoint.save.in_place import EarlySync


@pytest.fixture
def descriptor(tmp_path):
    opened = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    yield opened
    os.close(opened)


@pytest.fixture
def synced(monkeypatch):
    """Return the files that were put on disk; a name in ``fails`` raises instead."""
    done = []

    def to_disk(descriptor):
        done.append(os.fstat(descriptor).st_ino)
        if done[-1] in fails:
            raise OSError(errno.EIO, "Input/output error")

    fails = set()
    monkeypatch.setattr(in_place, "_to_disk", to_disk)
    monkeypatch.setattr(in_place, "_SYNC_BYTES", 10)
    return done, fails


def test_a_file_goes_to_disk_each_time_that_enough_was_written(descriptor, synced):
    done, _ = synced
    with EarlySync() as early:
        early.note(descriptor, 9)
        assert early._running is None
        early.note(descriptor, 1)
        early._running.result()
        early.note(descriptor, 9)
        assert len(done) == 1
        early.note(descriptor, 1)
    assert done == [os.fstat(descriptor).st_ino] * 2


def test_what_was_written_to_another_file_does_not_count(descriptor, synced, tmp_path):
    done, _ = synced
    with (tmp_path / "other").open("wb") as other, EarlySync() as early:
        early.note(descriptor, 9)
        early.note(other.fileno(), 9)
    assert not done


@pytest.mark.parametrize("again", [True, False], ids=["next write", "end"])
def test_a_disk_that_fails_is_told(descriptor, synced, again):
    _, fails = synced
    fails.add(os.fstat(descriptor).st_ino)
    next_one = os.dup(descriptor)
    os.close(next_one)
    early = EarlySync()
    early.note(descriptor, 10)
    early._running.exception()
    with pytest.raises(OSError, match="Input/output error"):
        early.note(descriptor, 10) if again else early.close()
    early.abandon()
    free = os.dup(descriptor)
    os.close(free)
    assert free == next_one, "its own descriptor of the file is closed"


def test_an_error_of_the_writer_is_what_is_told(descriptor, synced):
    _, fails = synced
    fails.add(os.fstat(descriptor).st_ino)

    def write():
        with EarlySync() as early:
            early.note(descriptor, 10)
            msg = "the writer's own"
            raise ValueError(msg)

    with pytest.raises(ValueError, match="the writer's own"):
        write()
