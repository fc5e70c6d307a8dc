"""Checkpoints at an S3 server on this machine, through a proxy that is slow, fails, or cuts connections."""

import os
from dataclasses import replace

import pytest
import torch
from engine_calls import EngineCalls
from resumable import ResumableRun as Run
from synthetic_state import SyntheticAdapter
from tests.shared.s3_server import Fault, environment, need_server

from booster_checkpoint.storage import obstore_storage
from booster_core import Booster
from booster_core.errors import CheckpointError, CheckpointUnreadableError
from booster_core.ranks.coordinator import DistCoordinator
from booster_core.state import ReplicatedStateAdapter
from booster_testing import expect_on_ranks, run_on_ranks

need_server()
pytest.importorskip("obstore", reason="obstore is what reaches S3")

MIB = 1 << 20
BUCKET = "s3://bucket"


def run_on_s3(s3, world_size, fn, *args):
    """Call a function on ranks whose environment names the server."""
    return run_on_ranks(on_s3, world_size, s3.url, fn, *args, timeout_seconds=240, group_timeout_seconds=120)


def expect_on_s3(s3, error, match, fn, *args):
    """Expect an error on two ranks whose environment names the server."""
    return expect_on_ranks(error, match, on_s3, 2, s3.url, fn, *args, timeout_seconds=240, group_timeout_seconds=120)


def on_s3(url, fn, *args):
    """Call a function on a rank whose environment names the server."""
    os.environ.update(environment(url))
    return fn(*args)


# ---- parts and ranges


def large_adapter(**options):
    c = DistCoordinator()
    tensors = [(f"t{index}", (2048, 1024), torch.float32) for index in range(3)]
    adapter = SyntheticAdapter(tensors, "flat", c.rank, c.world_size, states=(), **options)
    adapter.extra = {}
    return adapter


def save_large(url):
    obstore_storage.PART_BYTES = 8 * MIB
    EngineCalls(bucket_bytes=12 * MIB).save_model(large_adapter(), url)


def load_large(url):
    fresh = large_adapter(is_filled=False)
    EngineCalls(bucket_bytes=32 * MIB).load_model(fresh, url)
    return fresh.wrong()


def test_parts_travel_side_by_side_and_each_rank_reads_its_ranges(s3):
    """A file of 24 MiB: four equal parts, and the few bytes that are left; then each of two ranks reads half of it."""
    url = f"{BUCKET}/large.safetensors"
    s3.latency = 0.3
    run_on_s3(s3, 2, save_large, url)
    assert sum("partNumber" in path for _, path, _ in s3.requests) in (4, 5)
    assert s3.most_at_once >= obstore_storage.PARTS_IN_FLIGHT
    s3.requests.clear()
    s3.most_at_once = 0
    assert run_on_s3(s3, 2, load_large, url) == [[], []]
    assert 24 * MIB <= s3.bytes_read() <= 24 * MIB + 4 * (64 << 10)
    assert s3.most_at_once >= 3


# ---- faults


def save_step(root):
    run = Run()
    run.train(1)
    run.save(root)


def save_wide_model(url, value):
    model = torch.nn.ModuleList(torch.nn.Linear(512, 1024) for _ in range(3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    Booster("cpu").save_model(model, url, shard=True, size_per_shard=1)


def load_wide_model(url):
    model = torch.nn.ModuleList(torch.nn.Linear(512, 1024) for _ in range(3))
    Booster("cpu").load_model(model, url)
    return {value for parameter in model.parameters() for value in parameter.flatten().tolist()}


def test_a_model_whose_last_parts_fail_counts_as_interrupted(s3):
    """One file's part is refused when its upload is closed; the others may be visible by then."""
    url = f"{BUCKET}/partly"
    run_on_s3(s3, 2, save_wide_model, url, 1.0)
    s3.faults = [Fault("PUT", "/partly/model-00001-of-", "403", 10**6)]
    match = "privileges.* Other files in 's3://bucket/partly' may have been replaced already"
    expect_on_s3(s3, CheckpointUnreadableError, match, save_wide_model, url, 2.0)
    s3.faults = []
    assert s3.uploads("partly/") == []
    expect_on_s3(s3, CheckpointError, "interrupted", load_wide_model, url)
    run_on_s3(s3, 2, save_wide_model, url, 3.0)
    assert run_on_s3(s3, 2, load_wide_model, url) == [{3.0}, {3.0}]


class WithMasters(ReplicatedStateAdapter):
    """Reads the values of a bf16 model into fp32 masters as well, as strategies do that keep them."""

    def __init__(self, model):
        super().__init__(model, None, DistCoordinator())
        self.masters = {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}

    def model_targets(self, stored):
        yield from self.model_shards()
        for shard in self.model_shards():
            yield replace(shard, dtype=torch.float32, data=self.masters[shard.name], is_owner=False)


def load_bf16(url):
    """Load fp32 values into a bf16 model with masters; return whether masters have all digits."""
    values = torch.arange(4 << 20).view(4096, 1024).div(7)
    model = torch.nn.Linear(1024, 4096, bias=False)
    if url.endswith("bf16"):
        adapter = WithMasters(model.bfloat16())
        EngineCalls().load_model(adapter, url.removesuffix("-bf16"))
        return torch.equal(adapter.masters["weight"], values) and torch.equal(model.weight, values.bfloat16())
    with torch.no_grad():
        model.weight.copy_(values)
    Booster("cpu").save_model(model, url)
    return True


def test_masters_and_their_rounded_copy_take_one_fetch(s3):
    """A matrix of 16 MiB, which takes two requests."""
    url = f"{BUCKET}/masters.safetensors"
    run_on_s3(s3, 1, load_bf16, url)
    s3.requests.clear()
    assert run_on_s3(s3, 1, load_bf16, f"{url}-bf16") == [True]
    assert s3.bytes_read() <= 1.1 * 16 * MIB


@pytest.mark.slow  # waits for a slow proxy
def test_few_requests_of_a_save_wait_for_each_other(s3):
    s3.latency = 0.2
    run_on_s3(s3, 2, save_step, f"{BUCKET}/row")
    assert s3.in_a_row() <= 24
