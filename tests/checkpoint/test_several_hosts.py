"""Saves of ranks on several hosts: one rank writes each file, from front to back.

The hosts are names: ranks are told that they run on hosts of their own, and share the folder all the same.
"""

import errno
import itertools
import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from engine_calls import EngineCalls, on_hosts, on_hosts_with_disks_of_their_own
from matrix import matrix
from ranked import on_ranks
from synthetic_state import SyntheticAdapter, value_of

from booster_checkpoint import ModelPart, OptimizerPart
from booster_checkpoint.files.names import FileNames
from booster_checkpoint.save import in_place
from booster_checkpoint.save.owners import OwnerWrite
from booster_core.errors import CheckpointError
from booster_core.ranks.coordinator import DistCoordinator

TENSORS = [
    ("embed.weight", (33, 20), torch.float32),
    ("layers.0.weight", (12, 18), torch.bfloat16),
    ("layers.1.weight", (7, 5, 6), torch.float16),
    ("layers.1.mask", (31,), torch.bool),
    ("layers.2.bias", (61,), torch.float32),
    ("count", (), torch.int64),
    ("nothing", (0, 4), torch.float32),
]


def parts_of(adapter):
    """Return a model and an optimizer in many small files."""
    names = FileNames(base="model"), FileNames(base="optimizer")
    return ModelPart(adapter, names[0], max_bytes=600), OptimizerPart(adapter, names[1], max_bytes=900)


def save(folder, hosts, adapter=None, **options):
    """Save on hosts that see the same folder."""
    io = EngineCalls(bucket_bytes=1024)
    with on_hosts(hosts):
        io.write_folder("save", folder, parts_of(adapter or SyntheticAdapter(TENSORS, "columns")), **options)
    return io


def assert_loads(folder):
    io, adapter = EngineCalls(), SyntheticAdapter(TENSORS, "columns", is_filled=False)
    io.load_model(adapter, folder)
    io.load_optimizer(adapter, folder)
    assert adapter.wrong() == []


@on_ranks(2)
def test_wide_tensors_of_extra_state_follow_narrow_ones_to_the_host_that_writes(tmp_path):
    """`torch.save` files have them last, here after 31 bytes of a mask that the same rank sends."""
    adapter = SyntheticAdapter(TENSORS, "stages")
    if DistCoordinator().rank == 0:
        adapter.extra = {}
    with on_hosts([0, 1]):
        EngineCalls().save_model(adapter, tmp_path / "one.bin", use_safetensors=False)
    saved = torch.load(tmp_path / "one.bin")
    assert saved.pop("block._extra_state")["scale"].tolist() == [2.0, 2.0, 2.0]
    expected = {name: value_of(name, shape, dtype) for name, shape, dtype in TENSORS}
    torch.testing.assert_close(saved, expected, rtol=0, atol=0)


@on_ranks(4)
def test_each_file_has_one_writer_and_the_hosts_share_the_files(tmp_path):
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

    with mock.patch.object(in_place.os, "pwrite", write), mock.patch.object(in_place.os, "pread", pread):
        save(tmp_path, [0, 0, 1, 1], checksums=True)
    tensors = {name: ranges for name, ranges in written.items() if "-of-" in name}
    writers = DistCoordinator().all_gather_object(set(tensors))
    assert sum(map(len, writers)) == len(set().union(*writers)), "a file has two writers"
    assert all(writers), "a rank writes nothing"
    sizes = [len(names) for names in writers]
    assert max(sizes) - min(sizes) <= 1
    for name, ranges in tensors.items():
        assert ranges[0][0] == 0
        assert all(first[1] == second[0] for first, second in itertools.pairwise(ranges)), name
    assert not read & tensors.keys(), "checksums are those of memory"


# ---- what may go wrong


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
@on_ranks(3)
def test_a_failure_on_one_rank_keeps_the_old_checkpoint(kind, match, failing_rank, tmp_path):
    save(tmp_path, [0, 1, 1])
    adapter, io = SyntheticAdapter(TENSORS, "columns", is_filled=False), EngineCalls(bucket_bytes=1024)
    parts = parts_of(adapter)[:1]
    is_failing = DistCoordinator().rank == failing_rank
    real_write, real_shards = os.pwrite, adapter.model_shards

    def write(descriptor, content, offset):
        if is_failing and kind == "write":
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(descriptor, content, offset)

    def shards():
        yield next(real_shards())
        raise OSError(errno.EIO, "The offloaded values cannot be read")

    if is_failing and kind == "list":
        parts[0].extra_shards = shards
    if is_failing and kind == "send":
        adapter._model[0] = Unreadable(adapter._model[0])
    with (
        on_hosts([0, 1, 1]),
        mock.patch.object(in_place.os, "pwrite", write),
        pytest.raises(NotImplementedError if kind == "send" else CheckpointError, match=match),
    ):
        io.write_folder("save", tmp_path, parts)
    DistCoordinator().block_all()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert_loads(tmp_path)


@on_ranks(4)
def test_hosts_without_a_shared_folder_leave_all_files_to_the_host_of_rank_0(tmp_path):
    written, real_run = set(), OwnerWrite.run

    def run(self, group):
        told = real_run(self, group)
        written.update(told)
        return told

    with mock.patch.object(OwnerWrite, "run", run), on_hosts_with_disks_of_their_own([0, 0, 1, 1]):
        io = EngineCalls(bucket_bytes=1024)
        io.write_folder("save", tmp_path, parts_of(SyntheticAdapter(TENSORS, "columns")))
    assert bool(written) == (DistCoordinator().rank < 2)
    assert_loads(tmp_path)


@on_ranks(2)
def test_a_file_that_rank_0_does_not_see_is_an_error_before_the_commit(tmp_path):
    real = OwnerWrite.run

    def run(self, group):
        told = real(self, group)
        if DistCoordinator().rank == 1:
            next(path for path in (tmp_path / "m").iterdir() if "model-00002" in path.name).unlink()
        return told

    with (
        mock.patch.object(OwnerWrite, "run", run),
        pytest.raises(CheckpointError, match="the hosts do not see the same files"),
    ):
        save(tmp_path / "m", [0, 1])
    DistCoordinator().block_all()
    assert list(tmp_path.iterdir()) == []


@on_ranks(2)
def test_values_that_do_not_stay_are_copied_first(tmp_path):
    class OneStage(SyntheticAdapter):
        """An adapter that shows each shard in the same memory, as one that fetches values from a disk does."""

        keeps_values = False

        def model_shards(self):
            stage = torch.empty(1 << 16, dtype=torch.uint8)
            for shard in super().model_shards():
                data = stage[: shard.data.nbytes].view(shard.dtype).view(shard.data.shape)
                yield replace(shard, data=data.copy_(shard.data))
                stage.fill_(255)

    io = save(tmp_path, [0, 1], OneStage(TENSORS, "columns"))
    assert io.saver.buffers.nbytes == 0, "the copy is kept"
    assert_loads(tmp_path)
