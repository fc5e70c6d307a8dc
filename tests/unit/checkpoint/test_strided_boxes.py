"""A box of a tensor in a file, read and written where its elements are, whatever is around it."""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from booster_checkpoint.files import reading
from booster_checkpoint.save import strided
from booster_core.errors import CheckpointError
from booster_core.state import as_bytes, box_numel, box_shape, slices_of

DTYPES = st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128])
OFFSETS = st.sampled_from([0, 7, 4096, 4099])
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


@settings(deadline=None)
@given(case=boxes(), dtype=DTYPES, offset=OFFSETS, window_bytes=WINDOWS)
def test_a_box_is_read_from_a_file_or_memory(path, case, dtype, offset, window_bytes):
    shape, box = case
    whole = filled(shape, dtype)
    content = b"\xff" * offset + bytes(as_bytes(whole)) + b"\xff" * 3
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch, path.open("rb") as file:
        patch.setattr(reading, "_WINDOW_BYTES", window_bytes)
        for source in (file.fileno(), memoryview(content)):
            out = torch.zeros(box_numel(box), dtype=dtype)
            reading.read_strided(source, offset, shape, dtype.itemsize, box, out)
            assert torch.equal(out.view(box_shape(box)), whole[slices_of(box)])


@settings(deadline=None)
@given(case=boxes(), dtype=DTYPES, offset=OFFSETS, window_bytes=WINDOWS, reserves=st.booleans())
def test_a_box_is_written_into_a_file_and_nothing_else(path, case, dtype, offset, window_bytes, reserves):
    shape, box = case
    before, whole = torch.zeros(shape, dtype=dtype), filled(shape, dtype)
    path.write_bytes(b"\xff" * offset + bytes(as_bytes(before)) + b"\xff" * 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strided, "_WINDOW_BYTES", window_bytes)
        if not reserves:
            patch.setattr(strided, "_reserve", lambda *_: False)
        values = whole[slices_of(box)].contiguous()
        strided.write_strided(path, offset, shape, dtype.itemsize, box, as_bytes(values))
    before[slices_of(box)] = whole[slices_of(box)]
    assert path.read_bytes() == b"\xff" * offset + bytes(as_bytes(before)) + b"\xff" * 3


PAGE = mmap.ALLOCATIONGRANULARITY
SHAPE, BOX = (5, PAGE), ((1, 5), (0, PAGE - 1))
"""Rows as long as a page, so that the length of a mapping shows how many it holds."""


class Mappings:
    """Takes the place of `mmap.mmap`, and records the length of each mapping."""

    def __init__(self, monkeypatch):
        self.lengths = []
        make = mmap.mmap

        def recorded(descriptor, length, *args, **options):
            self.lengths.append(length)
            return make(descriptor, length, *args, **options)

        monkeypatch.setattr(mmap, "mmap", recorded)


@pytest.fixture
def mappings(monkeypatch):
    return Mappings(monkeypatch)


def write(path, window_bytes=4 << 20):
    whole = filled(SHAPE, torch.uint8)
    path.write_bytes(bytes(whole.numel()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strided, "_WINDOW_BYTES", window_bytes)
        strided.write_strided(path, 0, SHAPE, 1, BOX, as_bytes(whole[slices_of(BOX)].contiguous()))
    written = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).view(SHAPE)
    assert torch.equal(written[slices_of(BOX)], whole[slices_of(BOX)])


def read(path, window_bytes=4 << 20):
    path.write_bytes(bytes(math.prod(SHAPE)))
    with pytest.MonkeyPatch.context() as patch, path.open("rb") as file:
        patch.setattr(reading, "_WINDOW_BYTES", window_bytes)
        reading.read_strided(file.fileno(), 0, SHAPE, 1, BOX, torch.empty(box_numel(BOX), dtype=torch.uint8))


@pytest.mark.parametrize("move", [read, write])
@pytest.mark.parametrize(("window_bytes", "num_rows"), [(1, 1), (PAGE, 1), (2 * PAGE, 2), (100 * PAGE, 4)])
def test_a_window_of_the_file_is_mapped_at_a_time(path, mappings, move, window_bytes, num_rows):
    move(path, window_bytes)
    assert mappings.lengths == [num_rows * PAGE] * (4 // num_rows)


def test_a_file_whose_space_cannot_be_reserved_is_not_mapped(path, mappings, monkeypatch):
    """A write through a mapping that finds the disk full would end the process."""
    monkeypatch.setattr(strided, "_reserve", lambda *_: False)
    write(path)
    assert not mappings.lengths


def test_the_whole_tensor_s_space_is_reserved_before_it_is_mapped(path, mappings, monkeypatch):
    reserved = []
    monkeypatch.setattr(strided, "_reserve", lambda *args: not mappings.lengths and not reserved.append(args))
    whole = filled((6, 2), torch.float64)
    path.write_bytes(bytes(8 + whole.numel() * 8))
    strided.write_strided(path, 8, (6, 2), 8, ((0, 6), (1, 2)), as_bytes(whole[:, 1:].contiguous()))
    assert reserved == [(path, 8, 6 * 2 * 8)]
    assert len(mappings.lengths) == 1


@pytest.mark.parametrize("reserves", [True, False])
def test_files_are_closed_after_a_write(path, monkeypatch, reserves):
    monkeypatch.setattr(strided, "_reserve", lambda *_: reserves)
    before = set(Path("/proc/self/fd").iterdir())
    write(path)
    assert set(Path("/proc/self/fd").iterdir()) == before


@pytest.mark.parametrize("most", [1, 3, 1 << 30])
def test_a_range_is_read_in_calls_of_any_length(path, monkeypatch, most):
    monkeypatch.setattr(reading, "_MAX_CALL_BYTES", most)
    lengths, preadv = [], os.preadv

    def recorded(descriptor, targets, offset):
        lengths.append(len(targets[0]))
        return preadv(descriptor, targets, offset)

    monkeypatch.setattr(os, "preadv", recorded)
    path.write_bytes(bytes(range(20)))
    target = bytearray(8)
    with path.open("rb") as file:
        reading.pread_into(file.fileno(), memoryview(target), 5, path)
        assert target == bytes(range(5, 13))
        assert max(lengths) == min(most, 8)
        with pytest.raises(CheckpointError, match=r"file' ended at byte 20 while it was being read"):
            reading.pread_into(file.fileno(), memoryview(target), 15, path)
