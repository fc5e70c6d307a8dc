"""Columns are written through a mapping where space can be reserved, and by plain writes where it can't."""

import contextlib
import errno
import mmap
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from engine_calls import EngineCalls
from synthetic_state import SyntheticAdapter

from booster_core.errors import CheckpointError
from booster_core.ranks.coordinator import DistCoordinator
from booster_testing import expect_on_ranks, run_on_ranks

TENSORS = [("matrix", (100, 6), torch.float32), ("vector", (61,), torch.bfloat16)]


def save_every_form(folder):
    c = DistCoordinator()
    io = EngineCalls(bucket_bytes=1024)
    adapter = SyntheticAdapter(TENSORS, "columns", c.rank, c.world_size)
    folder = Path(folder)
    io.save_model(adapter, folder / "sharded", shard=True)
    io.save_optimizer(adapter, folder / "sharded", shard=True)
    io.save_model(adapter, folder / "one.safetensors")
    io.save_model(adapter, folder / "one.bin", use_safetensors=False)
    io.save_optimizer(adapter, folder / "optimizer.safetensors")
    io.wait()


def wrong_values(folder):
    c = DistCoordinator()
    io = EngineCalls()
    wrong = []
    pairs = ("sharded", "sharded"), ("one.safetensors", "optimizer.safetensors"), ("one.bin", "optimizer.safetensors")
    for model, optimizer in pairs:
        adapter = SyntheticAdapter(TENSORS, "columns", c.rank, c.world_size, is_filled=False)
        io.load_model(adapter, Path(folder) / model)
        io.load_optimizer(adapter, Path(folder) / optimizer)
        wrong += adapter.wrong()
    return wrong


def save_columns(folder, code):
    """Save where ``posix_fallocate`` fails by a code, if any; return how many mappings are written through."""
    refusal = contextlib.nullcontext()
    if code is not None:
        refusal = mock.patch.object(os, "posix_fallocate", side_effect=OSError(code, os.strerror(code)))
    with refusal, mock.patch.object(mmap, "mmap", wraps=mmap.mmap) as mappings:
        save_every_form(folder)
    return mappings.call_count


@pytest.mark.parametrize("code", [None, errno.EOPNOTSUPP, errno.EBADF])
def test_columns_are_written_through_mappings_of_reserved_space_alone(code, tmp_path):
    """A write through a mapping that finds the disk full ends the process with SIGBUS; a plain write raises."""
    assert all((count > 0) == (code is None) for count in run_on_ranks(save_columns, 2, str(tmp_path), code))
    assert run_on_ranks(wrong_values, 2, str(tmp_path)) == [[], []]


def test_a_disk_without_the_space_is_an_error_that_keeps_the_old_checkpoint(tmp_path):
    run_on_ranks(save_every_form, 2, str(tmp_path))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    expect_on_ranks(CheckpointError, "The disk is full", save_columns, 2, str(tmp_path), errno.ENOSPC)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
