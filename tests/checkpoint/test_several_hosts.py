"""Saves of ranks on several hosts: one rank writes each file, from front to back.

The hosts are names: ranks are told that they run on hosts of their own, and share the folder all the same.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from unittest import mock

import pytest
import torch
import xxhash
from engine_calls import EngineCalls, on_hosts, on_hosts_with_disks_of_their_own
from matrix import matrix
from ranked import on_ranks
from resumable import ResumableRun as Run
from synthetic_state import LAYOUTS, SyntheticAdapter, value_of
from tests.shared.fuse_mirror import mounted_mirror

from booster_checkpoint import ModelPart, OptimizerPart
from booster_checkpoint.files.names import FileNames
from booster_checkpoint.run.manifest import verify_folder
from booster_checkpoint.save import in_place
from booster_checkpoint.save.owners import OwnerWrite
from booster_core.errors import CheckpointError
from booster_core.ranks.coordinator import DistCoordinator
from booster_testing import expect_on_ranks, peak_memory, run_on_ranks

TENSORS = [
    ("embed.weight", (33, 20), torch.float32),
    ("layers.0.weight", (12, 18), torch.bfloat16),
    ("layers.1.weight", (7, 5, 6), torch.float16),
    ("layers.1.mask", (31,), torch.bool),
    ("layers.2.bias", (61,), torch.float32),
    ("count", (), torch.int64),
    ("nothing", (0, 4), torch.float32),
]
MIB = 1 << 20


def adapter_of(layout, **options):
    c = DistCoordinator()
    return SyntheticAdapter(TENSORS, layout, c.rank, c.world_size, **options)


def parts_of(adapter):
    """Return a model and an optimizer in many small files."""
    names = FileNames(base="model"), FileNames(base="optimizer")
    return ModelPart(adapter, names[0], max_bytes=600), OptimizerPart(adapter, names[1], max_bytes=900)


def save_every_form(folder, layout, hosts, use_async=False, **options):
    io = EngineCalls(bucket_bytes=1024, **options)
    adapter, folder = adapter_of(layout), Path(folder)
    files = []

    def commit(written):
        files.extend((file.name, [(block.nbytes, block.checksum) for block in file.blocks]) for file in written)

    with on_hosts(hosts):
        io.write_folder("save", folder / "both", parts_of(adapter), use_async=use_async, checksums=True, commit=commit)
        io.save_model(adapter, folder / "one.safetensors", use_async=use_async)
        io.save_model(adapter, folder / "one.bin", use_safetensors=False, use_async=use_async)
        io.save_optimizer(adapter, folder / "optimizer.safetensors", use_async=use_async)
        io.wait()
    return files


def wrong_values(folder, layout):
    io, wrong = EngineCalls(), []
    pairs = ("both", "both"), ("one.safetensors", "optimizer.safetensors"), ("one.bin", "optimizer.safetensors")
    for model, optimizer in pairs:
        adapter = adapter_of(layout, is_filled=False)
        io.load_model(adapter, Path(folder) / model)
        io.load_optimizer(adapter, Path(folder) / optimizer)
        wrong += adapter.wrong()
    return wrong


def digests(folder):
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@matrix(["replicated-True", "chunks-False", "stages-False"], layout=LAYOUTS, use_async=[False, True])
def test_several_hosts_write_the_bytes_that_one_host_writes(layout, use_async, tmp_path):
    one, several = tmp_path / "one", tmp_path / "several"
    run_on_ranks(save_every_form, 3, str(one), layout, [0, 0, 0])
    files = run_on_ranks(save_every_form, 3, str(several), layout, [0, 1, 1], use_async=use_async)[0]
    assert digests(one) == digests(several)
    assert len(files) > 6
    for name, blocks in files:
        content = (several / "both" / name).read_bytes()
        for nbytes, checksum in blocks:
            assert xxhash.xxh3_64_hexdigest(content[:nbytes]) == checksum
            content = content[nbytes:]
        assert not content
    assert run_on_ranks(wrong_values, 3, str(several), layout) == [[], [], []]


def save_extra_state_of_the_second_stage(folder, hosts):
    adapter = adapter_of("stages")
    if DistCoordinator().rank == 0:
        adapter.extra = {}
    with on_hosts(hosts):
        EngineCalls().save_model(adapter, Path(folder) / "one.bin", use_safetensors=False)


def test_wide_tensors_of_extra_state_follow_narrow_ones_to_the_host_that_writes(tmp_path):
    """`torch.save` files have them last, here after 31 bytes of a mask that the same rank sends."""
    run_on_ranks(save_extra_state_of_the_second_stage, 2, str(tmp_path), [0, 1])
    saved = torch.load(tmp_path / "one.bin")
    assert saved.pop("block._extra_state")["scale"].tolist() == [2.0, 2.0, 2.0]
    expected = {name: value_of(name, shape, dtype) for name, shape, dtype in TENSORS}
    torch.testing.assert_close(saved, expected, rtol=0, atol=0)


def recorded_save(folder, hosts):
    """Save; return the ranges of each file of tensors that this rank wrote, and the names of those that it read."""
    real_write, real_read = os.pwrite, os.pread
    written, read = defaultdict(list), set()

    def name_of(descriptor):
        return Path(f"/proc/self/fd/{descriptor}").readlink().name.split(".")[1]

    def write(descriptor, content, offset):
        written[name_of(descriptor)].append((offset, offset + len(content)))
        return real_write(descriptor, content, offset)

    def pread(descriptor, size, offset):
        read.add(name_of(descriptor))
        return real_read(descriptor, size, offset)

    with (
        mock.patch.object(in_place.os, "pwrite", write),
        mock.patch.object(in_place.os, "pread", pread),
        on_hosts(hosts),
    ):
        io = EngineCalls(bucket_bytes=1024)
        io.write_folder("save", Path(folder), parts_of(adapter_of("columns")), checksums=True)
    return {name: ranges for name, ranges in written.items() if "-of-" in name}, read


def test_each_file_has_one_writer_and_the_hosts_share_the_files(tmp_path):
    results = run_on_ranks(recorded_save, 4, str(tmp_path), [0, 0, 1, 1])
    writers = [set(written) for written, _ in results]
    assert sum(map(len, writers)) == len(set().union(*writers)), "a file has two writers"
    assert all(writers), "a rank writes nothing"
    sizes = [len(names) for names in writers]
    assert max(sizes) - min(sizes) <= 1
    for written, read in results:
        for name, ranges in written.items():
            assert ranges[0][0] == 0
            assert all(first[1] == second[0] for first, second in itertools.pairwise(ranges)), name
        assert not read & written.keys(), "checksums are those of memory"


@on_ranks(2)
def test_one_bucket_of_memory_is_enough(tmp_path):
    hosts = [0, 1]
    c = DistCoordinator()
    tensors = [(f"t{index}", (1024, 1024), torch.float32) for index in range(12)]
    adapter = SyntheticAdapter(tensors, "columns", c.rank, c.world_size, states=())
    adapter.extra = {}
    io = EngineCalls(bucket_bytes=8 * MIB)
    with on_hosts(hosts):
        io.save_model(adapter, tmp_path / "warm.safetensors")
        with peak_memory() as saving:
            io.save_model(adapter, tmp_path / "m", shard=True, size_per_shard=8)
    peak = saving.peak_bytes
    assert peak <= 14 * MIB


# ---- what may go wrong


def save_over(folder, hosts, failing_rank, kind):
    """Save; then save other values while one rank fails; return the error."""
    adapter = adapter_of("columns", is_filled=False)
    with on_hosts(hosts):
        io = EngineCalls(bucket_bytes=1024)
        io.write_folder("save", Path(folder), parts_of(adapter_of("columns")))
        is_failing = DistCoordinator().rank == failing_rank
        real_write, real_shards = os.pwrite, adapter.model_shards

        def write(descriptor, content, offset):
            if is_failing:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real_write(descriptor, content, offset)

        def shards():
            yield next(real_shards())
            raise OSError(errno.EIO, "The offloaded values cannot be read")

        with mock.patch.object(in_place.os, "pwrite", write if kind == "write" else real_write):
            parts = parts_of(adapter)[:1]
            if is_failing and kind == "list":
                parts[0].extra_shards = shards
            if is_failing and kind == "send":
                adapter._model[0] = Unreadable(adapter._model[0])
            io.write_folder("save", Path(folder), parts)


class Unreadable:
    """A shard whose values go when they are asked for a second time."""

    def __init__(self, shard):
        self._shard = shard

    def __getattr__(self, name):
        return getattr(self._shard, name)

    @property
    def data(self):
        return self._shard.data.to("meta")


@matrix(
    ["write-The disk is full-1", "list-cannot be read-1"],
    **{"kind, match": [("write", "The disk is full"), ("list", "cannot be read"), ("send", "meta")]},
    failing_rank=[0, 1, 2],
)
def test_a_failure_on_one_rank_keeps_the_old_checkpoint(kind, match, failing_rank, tmp_path):
    error = NotImplementedError if kind == "send" else CheckpointError
    expect_on_ranks(error, match, save_over, 3, str(tmp_path), [0, 1, 1], failing_rank, kind)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert run_on_ranks(loads, 3, str(tmp_path)) == [[], [], []]


def loads(folder):
    io, adapter = EngineCalls(), adapter_of("columns", is_filled=False)
    io.load_model(adapter, folder)
    io.load_optimizer(adapter, folder)
    return adapter.wrong()


def save_where_hosts_have_folders_of_their_own(folder, hosts):
    """Save while ranks of other hosts than rank 0's do not see its folder; return the files that this rank wrote."""
    written, real_run = set(), OwnerWrite.run

    def run(self, group):
        told = real_run(self, group)
        written.update(told)
        return told

    with mock.patch.object(OwnerWrite, "run", run), on_hosts_with_disks_of_their_own(hosts):
        io = EngineCalls(bucket_bytes=1024)
        io.write_folder("save", Path(folder), parts_of(adapter_of("columns")))
    return sorted(written)


def test_hosts_without_a_shared_folder_leave_all_files_to_the_host_of_rank_0(tmp_path):
    first, second, *others = run_on_ranks(save_where_hosts_have_folders_of_their_own, 4, str(tmp_path), [0, 0, 1, 1])
    assert first
    assert second
    assert others == [[], []]
    assert run_on_ranks(loads, 2, str(tmp_path)) == [[], []]


def save_and_lose(folder):
    """Save while a file that rank 1 has written does not reach rank 0."""
    real = OwnerWrite.run

    def run(self, group):
        told = real(self, group)
        if DistCoordinator().rank == 1:
            next(path for path in Path(folder).iterdir() if "model-00002" in path.name).unlink()
        return told

    with mock.patch.object(OwnerWrite, "run", run), on_hosts([0, 1]):
        io = EngineCalls(bucket_bytes=1024)
        io.write_folder("save", Path(folder), parts_of(adapter_of("columns")))


def test_a_file_that_rank_0_does_not_see_is_an_error_before_the_commit(tmp_path):
    expect_on_ranks(CheckpointError, "the hosts do not see the same files", save_and_lose, 2, str(tmp_path / "m"))
    assert list(tmp_path.iterdir()) == []


class OneStage(SyntheticAdapter):
    """An adapter that shows each shard in the same memory, as one that fetches values from a disk does."""

    keeps_values = False

    def model_shards(self):
        from dataclasses import replace

        stage = torch.empty(1 << 16, dtype=torch.uint8)
        for shard in super().model_shards():
            data = stage[: shard.data.nbytes].view(shard.dtype).view(shard.data.shape)
            yield replace(shard, data=data.copy_(shard.data))
            stage.fill_(255)


def save_staged(folder, hosts):
    c = DistCoordinator()
    adapter = OneStage(TENSORS, "columns", c.rank, c.world_size)
    with on_hosts(hosts):
        io = EngineCalls(bucket_bytes=1024)
        io.write_folder("save", Path(folder), parts_of(adapter))
    return io.saver.buffers.nbytes


def test_values_that_do_not_stay_are_copied_first(tmp_path):
    assert run_on_ranks(save_staged, 2, str(tmp_path), [0, 1]) == [0, 0], "the copy is kept"
    assert run_on_ranks(loads, 2, str(tmp_path)) == [[], []]


def save_and_resume(root, hosts, use_async=False):
    with on_hosts(hosts):
        run = Run()
        run.train(3)
        run.save(root, use_async=use_async)
        run.booster.wait()
        other = Run(seed=1)
        return other.load(root).step


@pytest.mark.parametrize("use_async", [False, True])
def test_training_state_of_several_hosts(use_async, tmp_path):
    assert run_on_ranks(save_and_resume, 2, str(tmp_path / "root"), [0, 1], use_async) == [3, 3]
    verify_folder(tmp_path / "root" / "step-00000003")


# ---- two mounts of one export, with a page cache each


@pytest.fixture
def mirrors(tmp_path):
    """Two FUSE mounts of one folder, which know as little of each other's pages as two hosts with NFS."""
    folders = [tmp_path / name for name in ("export", "one", "other")]
    for folder in folders:
        folder.mkdir()
    with contextlib.ExitStack() as stack:
        try:
            for point in folders[1:]:
                stack.enter_context(mounted_mirror(folders[0], point))
        except OSError as error:
            pytest.skip(f"FUSE can't be mounted here: {error}")
        yield folders


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_steps_are_whole_after_kills_on_two_hosts(mirrors, tmp_path):
    del mirrors  # the program mounts its own; this tells whether it can
    folder = tmp_path / "hosts"
    folder.mkdir()
    script = Path(__file__).with_name("hosts_to_kill.py")
    command = [sys.executable, str(script), str(folder), "5", "20"]
    # Its ranks are forks, which would wait for threads that only the first process has.
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["hosts"] == 2
    for life in found["lives"]:
        for step, wrong in life["seen"]:
            assert not wrong, "".join(wrong)
            assert step >= life["saved"]
    assert found["lives"][-1]["saved"] > 0
