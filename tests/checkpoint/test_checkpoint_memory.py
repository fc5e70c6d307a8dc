"""Saving and loading take at most a bucket of memory above the state, a copy in the background, and few open files."""

import resource
from pathlib import Path

import torch
from engine_calls import EngineCalls, on_hosts
from matrix import matrix, named
from ranked import on_ranks
from synthetic_state import SyntheticAdapter
from torch import nn

from booster_checkpoint import ModelPart
from booster_checkpoint.files.names import FileNames
from booster_core.ranks.coordinator import DistCoordinator
from booster_core.state import ReplicatedStateAdapter
from booster_testing import peak_memory

MIB = 1 << 20
BUCKET = 8 * MIB
SLACK = 6 * MIB
"""Python objects, gloo's buffers, and what malloc rounds up: measured 1 to 4 MiB."""


class Model(nn.Module):
    """Eight matrices of 8 MiB, so that neither one tensor nor all of them fit into what is allowed."""

    def __init__(self):
        super().__init__()
        self.matrices = nn.ParameterList(torch.ones(1024, 2048) for _ in range(8))


@matrix(
    ["one host-safetensors-converted", "two hosts-safetensors-same-dtype"],
    hosts=named([(0, 0), (0, 1)], ["one host", "two hosts"]),
    suffix=["safetensors", "bin"],
    file_dtype=named([None, torch.bfloat16], ["same-dtype", "converted"]),
)
@on_ranks(2)
def test_one_bucket_is_enough(hosts, suffix, file_dtype, tmp_path):
    coordinator = DistCoordinator()
    model = Model()
    adapter = ReplicatedStateAdapter(model, None, coordinator)
    io = EngineCalls(bucket_bytes=BUCKET)
    path = tmp_path / f"m.{suffix}"
    small = nn.Linear(2, 2)
    warm = ReplicatedStateAdapter(small, None, coordinator)
    with on_hosts(hosts):  # which are asked for once
        io.save_model(warm, tmp_path / f"w.{suffix}", use_safetensors=suffix != "bin")
    io.load_model(warm, tmp_path / f"w.{suffix}", num_threads=2)  # imports and groups are not counted
    with peak_memory() as saving:
        io.save_model(adapter, path, use_safetensors=suffix != "bin", dtype=file_dtype)
    with peak_memory() as loading:
        io.load_model(adapter, path, num_threads=2)
    assert saving.peak_bytes <= BUCKET + SLACK
    assert loading.peak_bytes <= BUCKET + SLACK


@on_ranks(2)
def test_columns_take_no_copy(tmp_path):
    tensors = [(f"t{index}", (2048, 2048), torch.float32) for index in range(3)]
    adapter = SyntheticAdapter(tensors, "columns", states=(), has_extra=False)
    io = EngineCalls(bucket_bytes=BUCKET)
    with peak_memory(maps_files=True) as saving:
        io.save_model(adapter, tmp_path / "m.safetensors")
    with peak_memory() as loading:
        io.load_model(adapter, tmp_path / "m.safetensors")
    assert saving.peak_bytes <= BUCKET + SLACK
    assert loading.peak_bytes <= BUCKET + SLACK


@on_ranks(2)
def test_the_background_takes_one_copy(tmp_path):
    coordinator = DistCoordinator()
    model = Model()
    adapter = ReplicatedStateAdapter(model, None, coordinator)
    io = EngineCalls(bucket_bytes=BUCKET)
    io.save_model(
        ReplicatedStateAdapter(nn.Linear(2, 2), None, coordinator), tmp_path / "w.safetensors", use_async=True
    )
    io.wait()
    with peak_memory() as saving:
        for index in range(2):
            io.save_model(adapter, tmp_path / f"{index}.safetensors", use_async=True)
        io.close()
    owned = sum(shard.data.nbytes for shard in adapter.model_shards() if shard.is_owner)
    assert saving.peak_bytes - owned <= BUCKET + SLACK


@on_ranks(1)
def test_few_files_are_open_however_many_a_checkpoint_has(tmp_path):
    model = nn.ParameterList([nn.Parameter(torch.full((64,), float(index))) for index in range(500)])
    adapter, io = ReplicatedStateAdapter(model, None, DistCoordinator()), EngineCalls()
    used = len([*Path("/proc/self/fd").iterdir()])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 48, hard))
    try:
        io.write_folder("save", tmp_path, [ModelPart(adapter, FileNames(base="model"), max_bytes=256)])
        assert len(list(tmp_path.glob("*.safetensors"))) == 500
        with torch.no_grad():
            for parameter in model:
                parameter.zero_()
        io.load_model(adapter, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all(bool((parameter == index).all()) for index, parameter in enumerate(model))
    assert len([*Path("/proc/self/fd").iterdir()]) <= used + 1
