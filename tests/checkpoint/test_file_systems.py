"""Saves where the file system cannot reserve space, or finds its disk full."""

import mmap
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import torch

from booster_core.ranks.coordinator import DistCoordinator
from booster_runtime.checkpoint import CheckpointFiles
from booster_runtime.checkpoint.run.manifest import verify_folder
from booster_testing import run_on_ranks
from booster_testing.resumable import ResumableRun as Run
from booster_testing.synthetic_state import SyntheticAdapter

TENSORS = [
    ("embed.weight", (33, 20), torch.float32),
    ("layers.0.weight", (12, 18), torch.bfloat16),
    ("layers.2.bias", (61,), torch.float32),
    ("count", (), torch.int64),
]


@pytest.fixture
def without_fallocate(tmp_path):
    """A file system that refuses ``fallocate`` with EOPNOTSUPP, as NFS before 4.2 and most of FUSE do."""
    folder = tmp_path / "ram"
    folder.mkdir()
    command = ["mount", "-t", "ramfs", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system without fallocate takes root's rights")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def save_every_form(folder, use_async=False):
    c = DistCoordinator()
    io = CheckpointFiles(c, bucket_bytes=1024)
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
    io = CheckpointFiles(c)
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


# ---- no space can be reserved


@pytest.mark.parametrize("use_async", [False, True])
def test_saves_on_a_file_system_without_fallocate(use_async, without_fallocate):
    run_on_ranks(save_every_form, 2, str(without_fallocate), use_async)
    assert run_on_ranks(wrong_values, 2, str(without_fallocate)) == [[], []]
    assert not list(without_fallocate.rglob("*.tmp"))


@pytest.mark.parametrize("use_async", [False, True])
def test_training_state_on_a_file_system_without_fallocate(use_async, without_fallocate):
    root = without_fallocate / "root"
    assert run_on_ranks(save_and_resume, 2, str(root), use_async) == [3, 3]
    verify_folder(root / "step-00000003")


def save_counting_mappings(folder):
    """Save; return how often a file was mapped to be written through."""
    real, count = mmap.mmap, []

    def counted(descriptor, length, flags, protection, **options):
        if protection & mmap.PROT_WRITE:
            count.append(length)
        return real(descriptor, length, flags, protection, **options)

    with mock.patch.object(mmap, "mmap", counted):
        save_every_form(folder)
    return len(count)


def test_nothing_is_written_through_mappings(tmp_path):
    """A write through a mapping that finds the disk full ends the process with SIGBUS; a plain write raises."""
    assert run_on_ranks(save_counting_mappings, 2, str(tmp_path)) == [0, 0]
    assert run_on_ranks(wrong_values, 2, str(tmp_path)) == [[], []]
