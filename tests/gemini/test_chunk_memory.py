"""Blocks in RAM and on a disk: values survive every move, bytes are counted, budgets hold, and faults are told."""

import errno
import os
import threading
import time
from unittest import mock

import pytest
import torch

from booster_core.errors import ConfigError, OffloadError
from booster_gemini.memory import ring as ring_module
from booster_gemini.memory.chunks import ChunkMemory, State
from booster_gemini.memory.disk import _THREADS, DiskStore
from booster_gemini.memory.ring import Ring
from booster_gemini.plan import Moves, Placement
from booster_runtime.memory import ALIGNMENT, aligned, aligned_buffer
from booster_zero.engine import FlatBuffer, Role

NUMEL = 5000
BYTES = 4 * NUMEL


class Owner:
    """Somebody who has a buffer, as buckets have."""

    def __init__(self, memory, number, value):
        self.memory = memory
        self.buffer = FlatBuffer(number, Role.PARAM, torch.full((NUMEL,), float(value)))
        self.key = self.buffer.key
        memory.add(self.buffer)

    @property
    def is_here(self):
        return self.buffer.tensor.stride() == (1,)

    def use(self, change=None):
        self.memory.fetch(self.buffer).wait()
        if change is not None:
            self.buffer.tensor.add_(change)
        value = self.buffer.tensor.unique().tolist()
        self.memory.release(self.buffer, changed=change is not None)
        return value


@pytest.fixture
def make(tmp_path):
    memories = []

    def make(placement):
        memory = ChunkMemory(torch.device("cpu"), placement, DiskStore(tmp_path))
        memories.append(memory)
        return memory

    yield make
    for memory in memories:
        memory.close()


def settle(store):
    """Return once everything that was begun so far is on the disk, or read."""
    barrier = threading.Barrier(_THREADS + 1)
    for _ in range(_THREADS):  # each thread that has arrived is done with what came before
        store._pool.submit(barrier.wait)
    barrier.wait()


EVERYTHING_AWAY = Placement(away={Role.PARAM: 1.0}, ahead={Role.PARAM: 2})


def within(budget):
    return Placement(budget_bytes=budget)


@pytest.mark.parametrize("budget", [None, 2 * BYTES + 100])
def test_later_steps_use_again_what_the_first_has_taken(budget, monkeypatch):
    """Buffers are of whole pages, and blocks are not."""
    made = []
    monkeypatch.setattr(
        ring_module, "aligned_buffer", lambda num_bytes: made.append(num_bytes) or aligned_buffer(num_bytes)
    )
    ring = Ring(torch.device("cpu"), budget)
    ring.take(100)  # is in use throughout
    for _ in range(4):
        both = [ring.take(BYTES) for _ in range(2)]
        while both:
            ring.give(both.pop(), BYTES)
        ring.end_step()
    assert made == [ALIGNMENT, aligned(BYTES), aligned(BYTES)]
    assert ring.held_bytes == 2 * BYTES + 100


def test_two_buffers_are_copied_from_at_once_and_a_third_use_waits_for_the_first():
    ring, copies, addresses = Ring(torch.device("cpu")), [mock.Mock() for _ in range(3)], []
    for copy in copies:
        copy.query.return_value = False
        buffer = ring.take(BYTES)
        addresses.append(buffer.data_ptr())
        ring.give(buffer, BYTES, copy)
        del buffer
    assert [copy.synchronize.called for copy in copies] == [True, False, False]
    assert addresses[0] == addresses[2] != addresses[1]


def test_regions_come_back_as_they_were_written(tmp_path):
    store = DiskStore(tmp_path)
    buffers = [aligned_buffer(20 << 20), aligned_buffer(1), aligned_buffer(ALIGNMENT + 1)]
    for number, buffer in enumerate(buffers):
        buffer.copy_(torch.arange(buffer.numel()).remainder(251 - number).to(torch.uint8))
    offsets = [store.allocate(buffer.numel()) for buffer in buffers]
    for part in [part for each in zip(offsets, buffers, strict=True) for part in store.move("written", *each)]:
        part.result()
    copies = [aligned_buffer(buffer.numel()) for buffer in buffers]
    for part in [part for each in zip(offsets, copies, strict=True) for part in store.move("read", *each)]:
        part.result()
    total = sum(buffer.numel() for buffer in buffers)
    assert all(map(torch.equal, buffers, copies))
    assert store.moved_bytes == {"written": total, "read": total}
    assert not list(tmp_path.iterdir())  # nobody can remove what has no name
    store.free(offsets[1], 1)
    assert store.allocate(1) == offsets[1]
    store.close()
    assert not [thread for thread in threading.enumerate() if "gemini disk" in thread.name]


def test_a_budget_moves_less_than_least_recently_used_on_a_loop(make):
    memory = make(within(4 * BYTES))
    owners = [Owner(memory, number, number) for number in range(10)]
    for _ in range(4):
        before = memory.store.moved_bytes["read"]
        for owner in [*owners, *reversed(owners)]:
            owner.use()
        memory.end_step()
    # Forth and back over ten with room for four: each way six have to come. Least recently used would bring all.
    assert 12 <= (memory.store.moved_bytes["read"] - before) / aligned(BYTES) <= 13


def test_what_is_read_ahead_makes_room_for_what_is_needed_now(make, monkeypatch):
    memory = make(within(2 * BYTES))
    owners = [Owner(memory, number, number) for number in range(3)]
    for owner in owners:
        owner.use(change=1.0)
    read = os.preadv
    with monkeypatch.context() as patch:
        patch.setattr("booster_gemini.memory.disk.os.preadv", lambda *args: (time.sleep(0.2), read(*args))[1])
        memory.fetch(owners[2].buffer).wait()
        memory._leave(memory._blocks[owners[1].key])
        memory._finish_leaving(memory._blocks[owners[1].key])
        memory._wanted.append(owners[0].key)  # as a plan does
        memory._bring_wanted()
        assert memory._blocks[owners[0].key].state is State.COMING
        assert owners[1].use() == [2.0]
        memory.release(owners[2].buffer, changed=False)
    assert owners[0].use() == [1.0]
    assert memory.top.peak_bytes <= 2 * BYTES


def test_a_block_that_is_wanted_while_it_is_written_stays(make, monkeypatch):
    memory, written, write = make(EVERYTHING_AWAY), threading.Event(), os.pwritev
    owners = [Owner(memory, number, number) for number in range(2)]
    settle(memory.store)
    memory._collect()
    monkeypatch.setattr("booster_gemini.memory.disk.os.pwritev", lambda *args: (written.wait(9), write(*args))[1])
    block = memory._blocks[owners[0].key]
    owners[0].use(change=1.0)
    memory._start_moves([Moves([], [owner.key for owner in owners])])
    assert block.state is State.LEAVING
    written.set()
    settle(memory.store)
    memory._start_moves([])
    assert block.state is State.HERE
    assert memory._blocks[owners[1].key].state is State.COMING
    assert [owner.use() for owner in owners] == [[1.0], [1.0]]


def test_bytes_are_counted_exactly(make):
    memory = make(EVERYTHING_AWAY)
    owner = Owner(memory, 0, 1.0)
    memory.fetch(owner.buffer).wait()
    assert memory.bytes_by_place() == {"cpu": BYTES, "disk": 0}
    assert memory.top.used_bytes == BYTES
    memory.reserve(77)
    assert memory.top.used_bytes == BYTES + 77
    memory.free(77)
    memory.release(owner.buffer, changed=True)
    memory.end_step()
    settle(memory.store)
    memory.fetch(owner.buffer).wait()
    memory.release(owner.buffer, changed=False)
    memory.drop(owner.buffer)
    assert memory.bytes_by_place() == {"cpu": 0, "disk": 0}
    assert memory.top.used_bytes == 0


def test_what_was_not_changed_is_not_written_again(make):
    memory = make(EVERYTHING_AWAY)
    owner = Owner(memory, 0, 3.0)
    for _ in range(4):
        assert owner.use() == [3.0]
        memory.end_step()
    written = memory.store.moved_bytes["written"]
    for _ in range(4):
        assert owner.use() == [3.0]
        memory.end_step()
    assert memory.store.moved_bytes["written"] == written


def test_forgotten_values_take_no_memory(make):
    memory = make(within(10 * BYTES))
    owner = Owner(memory, 0, 3.0)
    memory.forget(owner.buffer)
    assert not owner.is_here
    assert memory.bytes_by_place() == {"cpu": 0, "disk": 0}
    memory.fetch(owner.buffer).wait()
    assert owner.buffer.tensor.shape == (NUMEL,)
    memory.release(owner.buffer, changed=True)


def test_memory_that_somebody_still_reads_is_not_lent_again(make):
    memory = make(within(2 * BYTES))
    owners = [Owner(memory, number, number) for number in range(2)]
    memory.fetch(owners[0].buffer).wait()
    view = owners[0].buffer.tensor[:10]
    memory.release(owners[0].buffer, changed=False)
    others = [Owner(memory, number, number) for number in range(2, 8)]
    for owner in [*others, *owners]:
        owner.use(change=1.0)
    assert view.tolist() == [0.0] * 10


@pytest.mark.parametrize(
    ("prepare", "match"),
    [
        (lambda folder: folder / "absent", "does not exist on this host"),
        (lambda folder: (folder.joinpath("file").touch(), folder / "file")[1], "is no folder"),
    ],
    ids=["absent", "a file"],
)
def test_a_wrong_folder_is_refused(tmp_path, prepare, match):
    with pytest.raises(ConfigError, match=rf"`offload_dir='.*'` {match}"):
        DiskStore(prepare(tmp_path))


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("booster_gemini.memory.disk.tempfile.TemporaryFile", refuse)
    with pytest.raises(ConfigError, match=r"can't be written to: Permission denied\. Change its permissions"):
        DiskStore(tmp_path)


def test_room_that_there_is_not_is_refused_before_it_is_taken(tmp_path, monkeypatch):
    def fill(*_):
        pytest.fail("other programs find the disk full while room is taken that there is not")

    monkeypatch.setattr(os, "posix_fallocate", fill, raising=False)
    status = os.statvfs(tmp_path)
    with pytest.raises(OffloadError, match=r"needs \d+ more bytes, and \d+ are free"):
        DiskStore(tmp_path).allocate(status.f_bavail * status.f_frsize + 2**30)


def test_a_write_that_fails_keeps_the_values_in_memory(make, monkeypatch):
    memory = make(EVERYTHING_AWAY)
    owner = Owner(memory, 0, 1.0)
    owner.use()  # it is on the disk once before that is full

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("booster_gemini.memory.disk.os.pwritev", full)
        owner.use(change=4.0)
        owner.use()
        assert "Nothing is lost: what should have moved there is still in memory" in str(memory.problem())
    assert owner.use() == [5.0]


def test_a_file_that_was_cut_is_told_with_its_place(make):
    memory = make(EVERYTHING_AWAY)
    owners = [Owner(memory, number, number) for number in range(8)]
    for _ in range(2):
        for owner in owners:
            owner.use()
        memory.end_step()
    settle(memory.store)  # a write that comes later would make the file longer again
    os.truncate(memory.store._file.fileno(), 0)

    def use_all():
        for _ in range(2):  # what was read before the cut serves once
            for owner in owners:
                owner.use()
            memory.end_step()

    for _ in range(2):  # who goes on finds no other values
        with pytest.raises(OffloadError, match=r"at offset \d+ .* could not be read: the file ends at byte 0, so some"):
            use_all()


def test_a_write_does_not_make_a_cut_file_long_again(make):
    memory = make(EVERYTHING_AWAY)
    owner = Owner(memory, 0, 1)
    memory.fetch(owner.buffer).wait()
    os.truncate(memory.store._file.fileno(), 0)
    memory.release(owner.buffer, changed=True)
    owner.use()
    assert "could not be written: the file ends at byte 0, so somebody" in str(memory.problem())
