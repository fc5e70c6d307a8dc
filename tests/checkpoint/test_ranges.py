"""Which ranges of a file at a URL are read, and what is read ahead of its use."""

import itertools
import random
import threading

import pytest
import torch

from booster_checkpoint.files.byte_file import ByteFile
from booster_checkpoint.storage import StoredLocation
from booster_checkpoint.storage.stored_file import ReadAhead, StoredFile
from booster_core.errors import CheckpointError
from booster_core.state import as_bytes, box_numel, slices_of

MIB = 1 << 20


class OneFile:
    """A storage with one file, which counts what is asked for at a time."""

    def __init__(self, content):
        self.content = content
        self.asked = []
        self.held = self.most = 0
        self.lock = threading.Lock()
        self.fails = False

    def list(self, url):
        return {"": len(self.content)}

    def read(self, url, start, target):
        if self.fails:
            raise OSError(5, "Input/output error")
        with self.lock:
            self.asked.append((start, len(target)))
        target[:] = self.content[start : start + len(target)]


def file_of(content):
    storage = OneFile(content)
    return storage, StoredLocation(storage, "one://file").open()


@pytest.mark.parametrize("gap", [0, 40, 1 << 20])
def test_a_box_is_read_by_ranges_that_follow_each_other(gap, monkeypatch):
    monkeypatch.setattr(StoredFile, "gap_bytes", gap)
    shape, box = (4, 5, 6), ((1, 3), (0, 5), (2, 4))
    values = torch.arange(120, dtype=torch.float32).view(shape)
    storage, stored = file_of(bytes(70_000) + bytes(as_bytes(values)))
    file, out = ByteFile(stored), torch.empty(box_numel(box))
    file.read_box(70_000, shape, 4, box, out)
    file.close()
    assert torch.equal(out.view(2, 5, 2), values[slices_of(box)])
    spans = list(file.ranges_of(70_000, shape, 4, box))
    assert storage.asked == [(start, stop - start) for start, stop in spans]
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    assert (sum(stop - start for start, stop in spans) == 4 * box_numel(box)) == (gap == 0)


def test_reads_ahead_are_merged_bounded_and_whole():
    content = random.Random(3).randbytes(20 * MIB)
    storage, file = file_of(content)
    chance, uses, start = random.Random(5), [], 100_000
    while start < 19 * MIB:
        stop = start + chance.randrange(1, 300_000)
        uses.append((start, min(stop, len(content))))
        start = stop + chance.choice([0, 0, 1000, 2 * MIB])
    ahead = ReadAhead([(file, *use) for use in uses], 4 * MIB)
    for start, stop in uses:
        part = memoryview(bytearray(stop - start))
        file.read_into(part, start)
        assert bytes(part) == content[start:stop]
        assert ahead._held <= 4 * MIB
    assert len(storage.asked) < len(uses)
    assert sum(nbytes for _, nbytes in storage.asked) <= 20 * MIB
    file.close()
    assert ahead._held == 0


def test_reads_that_nobody_announced_and_that_are_left_out_do_no_harm():
    content = random.Random(4).randbytes(12 * MIB)
    _, file = file_of(content)
    pieces = [(start, start + MIB // 2) for start in range(MIB, 12 * MIB, MIB // 2)]
    ahead = ReadAhead([(file, *piece) for piece in pieces], 2 * MIB)
    for start, stop in [*pieces[::3], (70_000, 90_000), *pieces[::2]]:
        part = memoryview(bytearray(stop - start))
        file.read_into(part, start)
        assert bytes(part) == content[start:stop]
        assert ahead._held <= 4 * MIB
    file.close()


def test_content_from_front_to_back():
    content = random.Random(6).randbytes(9 * MIB + 17)
    _, file = file_of(content)
    assert b"".join(map(bytes, file.contents(5, len(content)))) == content[5:]
    file.close()


def test_a_failed_request_names_the_url():
    storage, file = file_of(bytes(MIB))
    ReadAhead([(file, 100_000, MIB)], MIB)
    storage.fails = True
    with pytest.raises(CheckpointError, match="'one://file' could not be read: Input/output error"):
        file.read_into(memoryview(bytearray(1000)), 200_000)
    with pytest.raises(CheckpointError, match="ended at byte"):
        file.read_into(memoryview(bytearray(1000)), MIB)
    file.close()
