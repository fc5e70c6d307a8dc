"""What was saved in any layout at any number of ranks is the same loaded in any other."""

import contextlib
import errno
import itertools
import mmap
import os
from unittest import mock

import pytest
from engine_calls import EngineCalls, on_hosts
from matrix import matrix
from ranked import on_ranks
from synthetic_state import LAYOUTS, TENSORS, SyntheticAdapter

from booster_core.errors import CheckpointError
from booster_core.ranks.coordinator import DistCoordinator
from booster_testing import expect_on_ranks, run_on_ranks


def save(folder, layout, suffix, num_hosts=1, use_async=False):
    c = DistCoordinator()
    io = EngineCalls(bucket_bytes=1024)
    adapter = SyntheticAdapter(TENSORS, layout)
    is_st = suffix == "st"
    with on_hosts([rank % num_hosts for rank in range(c.world_size)]):
        io.save_model(adapter, folder, shard=True, size_per_shard=1, use_safetensors=is_st, use_async=use_async)
        io.save_optimizer(adapter, folder, shard=True, use_async=use_async)
        io.save_model(adapter, folder / f"one.{'safetensors' if is_st else 'bin'}", use_safetensors=is_st)
        io.save_optimizer(adapter, folder / "one-optimizer.safetensors", use_async=use_async)
        io.wait()


def assert_loads(folder, layouts, num_threads=1, single=False):
    io = EngineCalls(bucket_bytes=1024)
    model = next(folder.glob("one.*")) if single else folder
    optimizer = folder / "one-optimizer.safetensors" if single else folder
    for layout in layouts:
        adapter = SyntheticAdapter(TENSORS, layout, is_filled=False)
        report = io.load_model(adapter, model, num_threads=num_threads)
        io.load_optimizer(adapter, optimizer, num_threads=num_threads)
        extra = adapter.extra["block._extra_state"]
        assert extra["scale"].tolist() == [2.0, 2.0, 2.0]
        assert (extra["names"], extra["n"]) == (["a", "b"], 3)
        assert adapter.options == {"lr": 0.5, "betas": (0.9, 0.99)}
        assert all(adapter.scalars[name] == {"step": 7} for name in adapter.scalars)
        assert adapter.finished == [(True, False), (False, True)]
        assert report.is_complete
        assert adapter.wrong() == []


@matrix(
    ["flat-1", "fused_rows-1", "stages-1"],
    **{"layout, world_size": [*itertools.product(LAYOUTS, [1, 2]), ("flat", 3), ("columns_flat", 4)]},
)
def test_loads_in_every_layout_at_another_number_of_ranks(layout, world_size, tmp_path):
    run_on_ranks(save, world_size, tmp_path, layout, "st")
    for other in {1: (2,), 2: (1, 3), 3: (2,), 4: (2,)}[world_size]:
        run_on_ranks(assert_loads, other, tmp_path, LAYOUTS)


@matrix(["2-False-st"], num_hosts=[1, 2], use_async=[False, True], suffix=["st", "bin"])
@on_ranks(2)
def test_every_route_and_container_holds_the_same(num_hosts, use_async, suffix, tmp_path):
    save(tmp_path, "columns_flat", suffix, num_hosts, use_async)
    for single in (False, True):
        assert_loads(tmp_path, ["flat", "columns"], single=single)


@matrix(["bin"], suffix=["st", "bin"])
@on_ranks(2)
def test_threads_give_the_same(suffix, tmp_path):
    save(tmp_path, "flat", suffix)
    assert_loads(tmp_path, ["columns", "chunks"], num_threads=3)


# ---- columns are written through a mapping where space can be reserved, and by plain writes where it can't


def save_columns(folder, code):
    """Save where ``posix_fallocate`` fails by a code, if any; return how many mappings are written through."""
    refusal = contextlib.nullcontext()
    if code is not None:
        refusal = mock.patch.object(os, "posix_fallocate", side_effect=OSError(code, os.strerror(code)))
    with refusal, mock.patch.object(mmap, "mmap", wraps=mmap.mmap) as mappings:
        for suffix in ("st", "bin"):
            save(folder / suffix, "columns", suffix)
    return mappings.call_count


@pytest.mark.parametrize("code", [None, errno.EOPNOTSUPP, errno.EBADF])
@on_ranks(2)
def test_columns_are_written_through_mappings_of_reserved_space_alone(code, tmp_path):
    """A write through a mapping that finds the disk full ends the process with SIGBUS; a plain write raises."""
    assert (save_columns(tmp_path, code) > 0) == (code is None)
    for suffix in ("st", "bin"):
        for single in (False, True):
            assert_loads(tmp_path / suffix, ["columns"], single=single)


def test_a_disk_without_the_space_is_an_error_that_keeps_the_old_checkpoint(tmp_path):
    run_on_ranks(save_columns, 2, tmp_path, None)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    expect_on_ranks(CheckpointError, "The disk is full", save_columns, 2, tmp_path, errno.ENOSPC)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
