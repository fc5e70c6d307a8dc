"""Checkpoints at an S3 server on this machine, through a proxy that is slow, fails, or cuts connections."""

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_calls import EngineCalls
from matrix import matrix
from resumable import ResumableRun as Run
from synthetic_state import LAYOUTS, SyntheticAdapter
from tests.shared.s3_server import Fault, environment, need_server

from booster_checkpoint.storage import locate, obstore_storage
from booster_core import Booster
from booster_core.errors import CheckpointError, CheckpointUnreadableError
from booster_core.ranks.coordinator import DistCoordinator
from booster_core.state import ReplicatedStateAdapter
from booster_testing import expect_on_ranks, peak_memory, run_on_ranks

need_server()
pytest.importorskip("obstore", reason="obstore is what reaches S3")

MIB = 1 << 20
BUCKET = "s3://bucket"
TENSORS = [
    ("embed.weight", (700, 300), torch.float32),
    ("layers.0.weight", (120, 180), torch.bfloat16),
    ("layers.1.weight", (7, 5, 6), torch.float16),
    ("layers.1.mask", (31,), torch.bool),
    ("layers.2.weight", (300, 500), torch.float32),
    ("count", (), torch.int64),
    ("nothing", (0, 4), torch.float32),
]


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


# ---- state in any layout


def save_and_load_every_form(base, layout, use_async):
    c = DistCoordinator()
    io = EngineCalls(bucket_bytes=64 << 10)
    adapter = SyntheticAdapter(TENSORS, layout, c.rank, c.world_size)
    io.save_model(adapter, f"{base}/sharded", shard=True, size_per_shard=1, use_async=use_async)
    io.save_optimizer(adapter, f"{base}/sharded", shard=True, size_per_shard=1, use_async=use_async)
    io.save_model(adapter, f"{base}/one.safetensors", use_async=use_async)
    io.save_model(adapter, f"{base}/one.bin", use_safetensors=False, use_async=use_async)
    io.wait()
    io.close()
    wrong = []
    for path, has_optimizer in (("sharded", True), ("one.safetensors", False), ("one.bin", False)):
        fresh = SyntheticAdapter(TENSORS, layout, c.rank, c.world_size, is_filled=False)
        io.load_model(fresh, f"{base}/{path}")
        if has_optimizer:
            io.load_optimizer(fresh, f"{base}/{path}")
            wrong += fresh.wrong()
        else:
            wrong += [key for key in fresh.wrong() if "/" not in key]
    return wrong


def some(cases, chosen):
    """Return cases of a test; the default run takes the chosen ones, as each takes seconds of requests."""
    return [pytest.param(*case, marks=[] if case[0] in chosen else pytest.mark.slow) for case in cases]


@matrix(
    ["flat-False"],
    **{"layout, use_async": some([(layout, n % 2 == 0) for n, layout in enumerate(LAYOUTS)], {"flat", "chunks"})},
)
def test_state_in_any_layout(layout, use_async, s3):
    args = (f"{BUCKET}/{layout}", layout, use_async)
    assert run_on_s3(s3, 2, save_and_load_every_form, *args) == [[], []]


# ---- parts and ranges


def large_adapter(layout, count=3, rank=None, world_size=None, **options):
    c = DistCoordinator()
    tensors = [(f"t{index}", (2048, 1024), torch.float32) for index in range(count)]
    adapter = SyntheticAdapter(tensors, layout, c.rank, c.world_size, states=(), **options)
    adapter.extra = {}
    return adapter


def save_large(url, layout, part_bytes, count=3):
    obstore_storage.PART_BYTES = part_bytes
    EngineCalls(bucket_bytes=12 * MIB).save_model(large_adapter(layout, count), url)


def load_large(url, layout, count=3):
    fresh = large_adapter(layout, count, is_filled=False)
    EngineCalls(bucket_bytes=32 * MIB).load_model(fresh, url)
    return fresh.wrong()


def test_parts_travel_side_by_side_and_each_rank_reads_its_ranges(s3):
    """A file of 24 MiB: four equal parts, and the few bytes that are left; then each of two ranks reads half of it."""
    url = f"{BUCKET}/large.safetensors"
    s3.latency = 0.3
    run_on_s3(s3, 2, save_large, url, "flat", 8 * MIB)
    assert sum("partNumber" in path for _, path, _ in s3.requests) in (4, 5)
    assert s3.most_at_once >= obstore_storage.PARTS_IN_FLIGHT
    s3.requests.clear()
    s3.most_at_once = 0
    assert run_on_s3(s3, 2, load_large, url, "flat") == [[], []]
    assert 24 * MIB <= s3.bytes_read() <= 24 * MIB + 4 * (64 << 10)
    assert s3.most_at_once >= 3


def staged_bytes(folder):
    return sum(path.stat().st_blocks * 512 for path in Path(folder).rglob("*") if path.is_file())


def save_and_load_measured(url, folder):
    obstore_storage.PART_BYTES, tempfile.tempdir = 10 * MIB, folder
    adapter, fresh = large_adapter("replicated", 12), large_adapter("replicated", 12, is_filled=False)
    io = EngineCalls(bucket_bytes=12 * MIB)
    io.save_model(large_adapter("replicated", 1), f"{url}-warm")
    io.load_model(large_adapter("replicated", 1, is_filled=False), f"{url}-warm")
    largest, real = [0], obstore_storage._ObjectStream.write

    def write(self, values):
        largest[0] = max(largest[0], staged_bytes(folder))
        real(self, values)

    obstore_storage._ObjectStream.write = write
    try:
        with peak_memory() as saving:
            io.save_model(adapter, url)
    finally:
        obstore_storage._ObjectStream.write = real
        tempfile.tempdir = None
    with peak_memory() as loading:
        io.load_model(fresh, url)
    return saving.peak_bytes, loading.peak_bytes, largest[0], fresh.wrong()


@pytest.mark.slow  # a large state over a slow proxy
def test_nothing_is_staged_and_memory_is_bounded(s3, tmp_path):
    """96 MiB pass through a bucket of 12 MiB and five parts of 10 MiB; a load keeps 12 MiB of requests."""
    [found] = run_on_s3(s3, 1, save_and_load_measured, f"{BUCKET}/m", str(tmp_path))
    saving, loading, staged, wrong = found
    assert wrong == []
    assert staged <= 64 << 10
    # Beyond what is counted: copies in the driver and in the client of HTTP, of what is on its way.
    assert saving <= 12 * MIB + 5 * 10 * MIB + 20 * MIB
    assert loading <= 12 * MIB + 20 * MIB


# ---- faults


def save_step(root, step, use_async):
    run = Run()
    run.train(step)
    run.save(root, use_async=use_async)
    run.booster.wait()


def load_step(root):
    return Run(seed=2).load(root).step


@pytest.mark.parametrize("kind", ["500", pytest.param("cut answer", marks=pytest.mark.slow)])
def test_a_load_that_fails_is_an_error_on_every_rank(kind, s3):
    root = f"{BUCKET}/unreadable-{kind.replace(' ', '-')}"
    run_on_s3(s3, 2, save_step, root, 1, False)
    s3.faults = [Fault("GET", "/model-", kind, 10**6)]
    expect_on_s3(s3, CheckpointError, "could not be read", load_step, root)


def replace_model(url, fails):
    run = Run()
    run.train(1)
    run.booster.save_model(run.model, url, shard=True)
    run.booster.save_model(run.model, f"{url}.safetensors")


def test_a_model_whose_upload_fails_stays_as_it_was(s3):
    url = f"{BUCKET}/kept"
    run_on_s3(s3, 2, replace_model, url, False)
    before = {path: locate(path).read_bytes() for path in (f"{url}/model-00001-of-00001.safetensors",)}
    s3.faults = [Fault("PUT", "/model-", "500", 10**6)]
    expect_on_s3(s3, CheckpointError, "could not be written", replace_model, url, True)
    assert {path: locate(path).read_bytes() for path in before} == before


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


def test_columns_of_a_wide_matrix_are_read_row_by_row(s3):
    """Rows are 4 MiB; a rank reads its quarter of each, and nothing of the others'."""
    run_on_s3(s3, 4, use_wide, f"{BUCKET}/wide.safetensors", True)
    s3.requests.clear()
    assert run_on_s3(s3, 4, use_wide, f"{BUCKET}/wide.safetensors", False) == [[]] * 4
    assert s3.bytes_read() <= 16 * MIB + 4 * (64 << 10)


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
    run_on_s3(s3, 2, save_step, f"{BUCKET}/row", 1, False)
    assert s3.in_a_row() <= 24


def use_wide(url, is_save):
    c = DistCoordinator()
    tensors = [("w", (4, 1 << 20), torch.float32)]
    adapter = SyntheticAdapter(tensors, "columns", c.rank, c.world_size, states=(), is_filled=is_save)
    adapter.extra = {}
    io = EngineCalls()
    if is_save:
        io.save_model(adapter, url)
        return []
    io.load_model(adapter, url)
    return adapter.wrong()
