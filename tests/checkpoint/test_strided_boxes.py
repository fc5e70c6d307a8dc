"""A box of a tensor in a file, read and written where its elements are, whatever is around it; also from a URL."""

import contextlib
import errno
import itertools
import math
import os
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from booster_checkpoint.files.byte_file import ByteFile, pieces_of
from booster_checkpoint.save import in_place
from booster_checkpoint.storage import StoredLocation, locate, open_file
from booster_checkpoint.storage.open_file import LocalFile
from booster_checkpoint.storage.stored_file import ReadAhead, StoredFile
from booster_core.errors import (
    CheckpointAbsentError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointUnreadableError,
)
from booster_core.state import as_bytes, box_numel, box_shape, is_contiguous, slices_of, span_of

DTYPES = st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128])
OFFSETS = st.sampled_from([0, 7, 4096, 4099])
GAPS = st.sampled_from([0, 8, 1 << 15])
WINDOWS = st.sampled_from([1, 40, 4 << 20])


@st.composite
def boxes(draw):
    """A shape of at least one dimension, and a box in it that is not empty."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    return shape, tuple((start, draw(st.integers(start + 1, size))) for start, size in zip(starts, shape, strict=True))


def filled(shape, dtype):
    return torch.arange(1, math.prod(shape) + 1).to(dtype).view(shape)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("boxes") / "file"


@given(case=boxes(), dtype=DTYPES, offset=OFFSETS, window_bytes=WINDOWS, gap_bytes=GAPS)
def test_a_box_is_read_from_a_file(path, case, dtype, offset, window_bytes, gap_bytes):
    shape, box = case
    whole = filled(shape, dtype)
    path.write_bytes(b"\xff" * offset + bytes(as_bytes(whole)) + b"\xff" * 3)
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.closing(ByteFile(locate(path).open())) as file,
    ):
        patch.setattr(LocalFile, "window_bytes", window_bytes)
        patch.setattr(LocalFile, "gap_bytes", gap_bytes)
        out = torch.zeros(box_numel(box), dtype=dtype)
        file.read_box(offset, shape, dtype.itemsize, box, out)
        assert torch.equal(out.view(box_shape(box)), whole[slices_of(box)])
    pieces = list(pieces_of(shape, box, dtype.itemsize, window_bytes, gap_bytes))
    assert sum(map(box_numel, pieces)) == box_numel(box)
    for piece in pieces:
        first, last = span_of(shape, piece)
        assert is_contiguous(shape, piece) or (last - first) * dtype.itemsize <= window_bytes, "with its gaps"


@given(case=boxes(), dtype=DTYPES, offset=OFFSETS, window_bytes=WINDOWS, is_mapped=st.booleans())
def test_a_box_is_written_into_a_file_and_nothing_else(path, case, dtype, offset, window_bytes, is_mapped):
    shape, box = case
    before, whole = torch.zeros(shape, dtype=dtype), filled(shape, dtype)
    path.write_bytes(b"\xff" * offset + bytes(as_bytes(before)) + b"\xff" * 3)
    with pytest.MonkeyPatch.context() as patch, path.open("r+b", buffering=0) as file:
        patch.setattr(in_place, "_WINDOW_BYTES", window_bytes)
        values = as_bytes(whole[slices_of(box)].contiguous())
        in_place.write_box(file.fileno(), offset, shape, dtype.itemsize, box, values, path if is_mapped else None)
    before[slices_of(box)] = whole[slices_of(box)]
    assert path.read_bytes() == b"\xff" * offset + bytes(as_bytes(before)) + b"\xff" * 3


@pytest.fixture
def reads(monkeypatch):
    """Where each call of `os.preadv` reads, and how much."""
    calls, preadv = [], os.preadv

    def recorded(descriptor, targets, offset):
        calls.append((offset, len(targets[0])))
        return preadv(descriptor, targets, offset)

    monkeypatch.setattr(os, "preadv", recorded)
    return calls


@pytest.mark.parametrize("most", [1, 3, 1 << 30])
def test_a_range_is_read_in_calls_of_any_length(path, reads, monkeypatch, most):
    monkeypatch.setattr(open_file, "_MAX_CALL_BYTES", most)
    path.write_bytes(bytes(range(20)))
    target = bytearray(8)
    with contextlib.closing(locate(path).open()) as file:
        assert file.size == 20
        file.read_into(memoryview(target), 5)
        assert target == bytes(range(5, 13))
        assert max(length for _, length in reads) == min(most, 8)
        with pytest.raises(CheckpointDamagedError, match=r"file' ended at byte 20 while it was being read"):
            file.read_into(memoryview(target), 15)


def read_columns(path, width, columns, itemsize=4):
    """Read columns of a matrix of 8 rows."""
    whole = torch.arange(8 * width, dtype=torch.int32).view(8, width)
    path.write_bytes(bytes(as_bytes(whole)))
    out = torch.empty(8 * (columns[1] - columns[0]), dtype=torch.int32)
    with contextlib.closing(ByteFile(locate(path).open())) as file:
        file.read_box(0, (8, width), itemsize, ((0, 8), columns), out)
    assert torch.equal(out.view(8, -1), whole[:, slice(*columns)])


def test_rows_with_small_gaps_are_read_in_windows_of_a_mebibyte(path, reads):
    width = 1 << 16  # 256 KiB
    read_columns(path, width, (10, width - 10))
    inside = (width - 20) * 4
    assert reads == [(40, 3 * width * 4 + inside), (4 * width * 4 + 40, 3 * width * 4 + inside)]


def test_large_gaps_are_left_out(path, reads):
    width = 1 << 16
    read_columns(path, width, (0, width // 2))
    assert reads == [(row * width * 4, width * 2) for row in range(8)]


def test_a_file_that_is_cut_off_while_it_is_open_is_damaged(path):
    path.write_bytes(bytes(1000))
    with contextlib.closing(ByteFile(locate(path).open())) as file:
        os.truncate(path, 500)
        with pytest.raises(CheckpointDamagedError, match=r"file' ended at byte 500 while it was being read"):
            file.read_box(0, (10, 100), 1, ((0, 10), (10, 20)), torch.empty(100, dtype=torch.uint8))


AT_7 = "file' cannot be read at byte 7: "


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        (errno.EIO, CheckpointUnreadableError, rf"{AT_7}Input/output error\. The disk"),
        (errno.EACCES, CheckpointUnreadableError, rf"{AT_7}Permission denied\. Check its owner"),
        (errno.ESTALE, CheckpointUnreadableError, rf"{AT_7}Stale file handle\. Its .*load it again"),
        (errno.EINVAL, CheckpointUnreadableError, rf"{AT_7}Invalid argument\.$"),
        (errno.ENOENT, CheckpointAbsentError, r"There is no '.*file'"),
        (errno.ENOTDIR, CheckpointAbsentError, r"There is no '.*file'"),
    ],
)
def test_what_the_system_refuses_is_of_its_kind(path, monkeypatch, code, kind, message):
    path.write_bytes(bytes(20))

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    with contextlib.closing(ByteFile(locate(path).open())) as file:
        monkeypatch.setattr(os, "preadv", refuse)
        with pytest.raises(kind, match=message) as caught:
            file.read_into(memoryview(bytearray(4)), 7)
        assert caught.value.__cause__.errno == code


def test_a_file_that_is_not_there_or_is_a_folder_is_an_error_when_it_is_opened(tmp_path):
    with pytest.raises(CheckpointAbsentError, match=r"There is no '.*absent'"):
        locate(tmp_path / "absent").open()
    with (
        contextlib.closing(locate(tmp_path).open()) as folder,
        pytest.raises(CheckpointUnreadableError, match="Is a dir"),
    ):
        folder.read_into(memoryview(bytearray(4)), 0)


# ---- files at a URL: which ranges are read, and what is read ahead of its use

MIB = 1 << 20


class OneFile:
    """A storage with one file, which counts what is asked for at a time."""

    def __init__(self, content):
        self.content = content
        self.asked = []
        self.fails = False

    def list(self, url):
        return {"": len(self.content)}

    def read(self, url, start, target):
        if self.fails:
            raise OSError(5, "Input/output error")
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
