"""Saves on several file systems, and loads from a disk that fails."""

import contextlib
import errno
import mmap
import os
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import torch
from engine_calls import EngineCalls
from matrix import matrix
from resumable import ResumableRun as Run
from synthetic_state import SyntheticAdapter
from tests.shared.fuse_mirror import mounted_mirror

from booster_checkpoint.run.manifest import verify_folder
from booster_core.errors import CheckpointError, CheckpointUnreadableError
from booster_core.ranks.coordinator import DistCoordinator
from booster_testing import expect_on_ranks, run_on_ranks

TENSORS = [
    ("embed.weight", (33, 20), torch.float32),
    ("layers.0.weight", (12, 18), torch.bfloat16),
    ("layers.2.bias", (61,), torch.float32),
    ("columns.weight", (100, 6), torch.float32),
    ("count", (), torch.int64),
]


@contextlib.contextmanager
def mounted(kind, base):
    """Mount a file system while the body runs, and give its folder."""
    point = base / "mount"
    point.mkdir()
    with contextlib.ExitStack() as stack:
        options = []
        if kind == "fuse":
            (base / "shown").mkdir()
            stack.enter_context(mounted_mirror(base / "shown", point))
        else:
            if kind == "overlay":  # on a tmpfs, because it can't be on another overlay
                inner = stack.enter_context(mounted("tmpfs", base / "layers"))
                lower, upper, work = (inner / name for name in ("lower", "upper", "work"))
                for folder in (lower, upper, work):
                    folder.mkdir()
                options = ["-o", f"lowerdir={lower},upperdir={upper},workdir={work}"]
            command = ["mount", "-t", kind, *options, "none", str(point)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise OSError(done.stderr.strip())
            stack.callback(subprocess.run, ["umount", str(point)], check=True)
        yield point


FILE_SYSTEMS = ("ramfs", "tmpfs", "overlay", "fuse")


@pytest.fixture
def file_system(kind, tmp_path):
    (tmp_path / "layers").mkdir()
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(mounted(kind, tmp_path))
        except OSError as error:
            pytest.skip(f"{kind} can't be mounted here: {error}")
        yield folder


def save_every_form(folder, use_async=False):
    c = DistCoordinator()
    io = EngineCalls(bucket_bytes=1024)
    adapter = SyntheticAdapter(TENSORS, "columns", c.rank, c.world_size)
    folder = Path(folder)
    io.save_model(adapter, folder / "sharded", shard=True, use_async=use_async)
    io.save_optimizer(adapter, folder / "sharded", shard=True, use_async=use_async)
    io.save_model(adapter, folder / "one.safetensors", use_async=use_async)
    io.save_model(adapter, folder / "one.bin", use_safetensors=False, use_async=use_async)
    io.save_optimizer(adapter, folder / "optimizer.safetensors", use_async=use_async)
    io.wait()


def wrong_values(folder):
    c = DistCoordinator()
    io = EngineCalls()
    wrong = []
    for model, optimizer in (
        ("sharded", "sharded"),
        ("one.safetensors", "optimizer.safetensors"),
        ("one.bin", "optimizer.safetensors"),
    ):
        adapter = SyntheticAdapter(TENSORS, "columns", c.rank, c.world_size, is_filled=False)
        io.load_model(adapter, Path(folder) / model)
        io.load_optimizer(adapter, Path(folder) / optimizer)
        wrong += adapter.wrong()
    return wrong


def save_and_resume(root, use_async=False):
    run = Run()
    run.train(3)
    run.save(root, use_async=use_async)
    run.booster.wait()
    other = Run(seed=1)
    return other.load(root).step


# ---- file systems


@matrix(["ramfs-False", "overlay-False"], kind=FILE_SYSTEMS, use_async=[False, True])
def test_saves_on_a_file_system(use_async, file_system):
    run_on_ranks(save_every_form, 2, str(file_system), use_async)
    assert run_on_ranks(wrong_values, 2, str(file_system)) == [[], []]
    assert not list(file_system.rglob("*.tmp"))


@matrix(["tmpfs-False", "overlay-False"], kind=FILE_SYSTEMS, use_async=[False, True])
def test_training_state_on_a_file_system(use_async, file_system):
    root = file_system / "root"
    assert run_on_ranks(save_and_resume, 2, str(root), use_async) == [3, 3]
    verify_folder(root / "step-00000003")


# ---- columns, which are written through a mapping where space can be reserved


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


# ---- a disk that fails

LARGE = [("weight", (700, 600), torch.float32)]


def save_large(path):
    EngineCalls().save_model(SyntheticAdapter(LARGE, "flat", 0, 1), path)


def load_large(path, kind):
    c = DistCoordinator()
    adapter = SyntheticAdapter(LARGE, kind, c.rank, c.world_size, is_filled=False)
    EngineCalls().load_model(adapter, path)
    return adapter.wrong()


@pytest.mark.parametrize("kind", ["flat", "columns"])
def test_a_bad_sector_is_an_error_and_ends_no_process(kind, tmp_path):
    """A read of it through a mapping would end the process with SIGBUS."""
    shown, point = tmp_path / "shown", tmp_path / "mount"
    shown.mkdir()
    point.mkdir()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(mounted_mirror(shown, point))
        except OSError as error:
            pytest.skip(f"FUSE can't be mounted here: {error}")
        save_large(shown / "m.safetensors")
        (tmp_path / "shown.fails").write_text("800000")
        message = r"m\.safetensors' cannot be read at byte \d+: Input/output error"
        path = str(point / "m.safetensors")
        expect_on_ranks(CheckpointUnreadableError, message, load_large, 2, path, kind)
        (tmp_path / "shown.fails").unlink()
        assert run_on_ranks(load_large, 2, path, kind) == [[], []]
