"""What was saved in any layout at any number of ranks is the same loaded in any other."""

import contextlib
import errno
import itertools
import mmap
import os
from pathlib import Path
from unittest import mock

import pytest
from engine_calls import EngineCalls, on_hosts
from matrix import matrix
from synthetic_state import LAYOUTS, TENSORS, SyntheticAdapter

from booster_core.errors import CheckpointError
from booster_core.ranks.coordinator import DistCoordinator
from booster_testing import expect_on_ranks, run_on_ranks


def save(folder, layout, num_hosts, use_async, suffix):
    c = DistCoordinator()
    io = EngineCalls(bucket_bytes=1024)
    adapter = SyntheticAdapter(TENSORS, layout)
    folder, is_st = Path(folder), suffix == "st"
    with on_hosts([rank % num_hosts for rank in range(c.world_size)]):
        io.save_model(adapter, folder, shard=True, size_per_shard=1, use_safetensors=is_st, use_async=use_async)
        io.save_optimizer(adapter, folder, shard=True, use_async=use_async)
        io.save_model(adapter, folder / f"one.{'safetensors' if is_st else 'bin'}", use_safetensors=is_st)
        io.save_optimizer(adapter, folder / "one-optimizer.safetensors", use_async=use_async)
        io.wait()


def load(folder, layout, num_threads, single):
    io = EngineCalls(bucket_bytes=1024)
    adapter = SyntheticAdapter(TENSORS, layout, is_filled=False)
    folder = Path(folder)
    model = next(folder.glob("one.*")) if single else folder
    optimizer = folder / "one-optimizer.safetensors" if single else folder
    report = io.load_model(adapter, model, num_threads=num_threads)
    io.load_optimizer(adapter, optimizer, num_threads=num_threads)
    extra = adapter.extra["block._extra_state"]
    assert extra["scale"].tolist() == [2.0, 2.0, 2.0]
    assert (extra["names"], extra["n"]) == (["a", "b"], 3)
    assert adapter.options == {"lr": 0.5, "betas": (0.9, 0.99)}
    assert all(adapter.scalars[name] == {"step": 7} for name in adapter.scalars)
    assert adapter.finished == [(True, False), (False, True)]
    assert report.is_complete
    return adapter.wrong(), report.loaded


def load_all(folder, layouts, *args):
    return [load(folder, layout, *args) for layout in layouts]


@matrix(
    ["flat-1", "fused_rows-1", "stages-1"],
    **{"layout, world_size": [*itertools.product(LAYOUTS, [1, 2]), ("flat", 3), ("columns_flat", 4)]},
)
def test_loads_in_every_layout_at_another_number_of_ranks(layout, world_size, tmp_path):
    run_on_ranks(save, world_size, str(tmp_path), layout, 1, False, "st")
    for other in {1: (2,), 2: (1, 3), 3: (2,), 4: (2,)}[world_size]:
        for results in run_on_ranks(load_all, other, str(tmp_path), LAYOUTS, 1, False):
            assert all(wrong == [] for wrong, _ in results)


@matrix(["2-False-st"], num_hosts=[1, 2], use_async=[False, True], suffix=["st", "bin"])
def test_every_route_and_container_holds_the_same(num_hosts, use_async, suffix, tmp_path):
    run_on_ranks(save, 2, str(tmp_path), "columns_flat", num_hosts, use_async, suffix)
    for single in (False, True):
        for results in run_on_ranks(load_all, 2, str(tmp_path), ["flat", "columns"], 1, single):
            assert all(wrong == [] for wrong, _ in results)


@matrix(["bin"], suffix=["st", "bin"])
def test_threads_give_the_same(suffix, tmp_path):
    run_on_ranks(save, 2, str(tmp_path), "flat", 1, False, suffix)
    for results in run_on_ranks(load_all, 2, str(tmp_path), ["columns", "chunks"], 3, False):
        assert all(wrong == [] for wrong, _ in results)


# ---- columns are written through a mapping where space can be reserved, and by plain writes where it can't


def save_columns(folder, code):
    """Save where ``posix_fallocate`` fails by a code, if any; return how many mappings are written through."""
    refusal = contextlib.nullcontext()
    if code is not None:
        refusal = mock.patch.object(os, "posix_fallocate", side_effect=OSError(code, os.strerror(code)))
    with refusal, mock.patch.object(mmap, "mmap", wraps=mmap.mmap) as mappings:
        for suffix in ("st", "bin"):
            save(f"{folder}/{suffix}", "columns", 1, False, suffix)
    return mappings.call_count


@pytest.mark.parametrize("code", [None, errno.EOPNOTSUPP, errno.EBADF])
def test_columns_are_written_through_mappings_of_reserved_space_alone(code, tmp_path):
    """A write through a mapping that finds the disk full ends the process with SIGBUS; a plain write raises."""
    assert all((count > 0) == (code is None) for count in run_on_ranks(save_columns, 2, str(tmp_path), code))
    for suffix in ("st", "bin"):
        for single in (False, True):
            for results in run_on_ranks(load_all, 2, str(tmp_path / suffix), ["columns"], 1, single):
                assert all(wrong == [] for wrong, _ in results)


def test_a_disk_without_the_space_is_an_error_that_keeps_the_old_checkpoint(tmp_path):
    run_on_ranks(save_columns, 2, str(tmp_path), None)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    expect_on_ranks(CheckpointError, "The disk is full", save_columns, 2, str(tmp_path), errno.ENOSPC)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
