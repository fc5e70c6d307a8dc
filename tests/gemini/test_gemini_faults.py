"""What can go wrong while chunks move: the error comes on every rank, says what to do, and nothing is lost."""

import contextlib
import errno
import gc
import os
import resource
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from matrix import matrix
from patience import unhindered_seconds
from ranked import on_ranks, raises_on_ranks

from booster_core import Booster
from booster_core.errors import BudgetError, OffloadError
from booster_gemini import GeminiPlugin
from booster_testing.compare import EXACT, assert_same_tensors
from booster_testing.models import tiny_llama

DISK = {"offload_param_frac": 1.0, "offload_optim_frac": 1.0}


def boost(folder, *, precision=None, sizes=(), **options):
    plugin = GeminiPlugin(**{"min_chunk_bytes": 8192, "offload_dir": folder, **options})
    booster = Booster("cpu", precision, plugin)
    torch.manual_seed(0)
    model = tiny_llama(**dict(sizes))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    return booster, model, optimizer


def step(booster, model, optimizer, number=0, max_norm=None):
    """Take a step, and return the loss and the norm."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(64, (2 * size, 8), generator=generator)[rank::size].contiguous()
    loss = model(input_ids=tokens, labels=tokens).loss
    booster.backward(loss, optimizer)
    norm = None if max_norm is None else float(optimizer.clip_grad_by_norm(max_norm))
    try:
        optimizer.step()
    finally:
        optimizer.zero_grad()
    return loss.item(), norm


def steps(run, numbers):
    return [step(*run, number) for number in numbers]


@on_ranks(2)
def test_a_full_disk_loses_nothing_and_the_step_can_be_saved(tmp_path):
    full, loaded, undisturbed = boost(str(tmp_path), **DISK), boost(None), boost(None)
    booster, model, optimizer = full
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (model.gatherer.memory.store._end + 30_000, hard))
    try:
        # States are made in the first step, and found no room for.
        with pytest.raises(OffloadError, match=r"needs \d+ more bytes, and .*Nothing is lost"):
            step(*full)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    booster.save_model(model, tmp_path / "model", shard=True)
    booster.save_optimizer(optimizer, tmp_path / "optimizer", shard=True)
    booster, model, optimizer = loaded
    booster.load_model(model, tmp_path / "model")
    booster.load_optimizer(optimizer, tmp_path / "optimizer")
    step(*undisturbed)
    expected = steps(undisturbed, (1, 2))
    for run in (full, loaded):
        assert steps(run, (1, 2)) == expected
        assert_same_tensors(run[1].state_dict(), undisturbed[1].state_dict(), EXACT)


@raises_on_ranks(OffloadError, r"needs \d+ more bytes", 2)
def test_a_disk_that_is_full_at_boost_is_told_on_every_rank(tmp_path):
    folder = str(tmp_path)
    # Not a limit on the size of files, which the store by which ranks meet may be kept in.
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch("os.posix_fallocate", side_effect=full) if dist.get_rank() == 1 else contextlib.nullcontext():
        boost(folder, **DISK)


@on_ranks(2)
def test_a_budget_that_is_too_small_names_the_least_that_does(tmp_path):
    run = boost(str(tmp_path), placement_policy="auto", memory_budget_bytes=12_000, min_chunk_bytes=512)
    match = r"`memory_budget_bytes=12000` is too small: (model\.\S+|lm_head|backward|step) .*needs \d+ bytes at once"
    with pytest.raises(BudgetError, match=match) as caught:
        steps(run, range(4))
    least = torch.tensor(caught.value.least_bytes)
    dist.all_reduce(least, dist.ReduceOp.MAX)
    enough = {"placement_policy": "auto", "memory_budget_bytes": int(least), "min_chunk_bytes": 512}
    assert steps(boost(str(tmp_path), **enough), range(3)) == steps(boost(None), range(3))


SIZES = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 128, "num_hidden_layers": 3}


def state_of_all_ranks(bytes_each):
    """Return the bytes of the state of a model of these sizes."""
    return bytes_each * sum(parameter.numel() for parameter in tiny_llama(**SIZES).parameters())


def clipped_steps(folder, precision, budget, min_chunk_bytes=40_000):
    """Return losses and norms, whole parameters and the peak of the steps, within a budget if there is one."""
    options = {} if budget is None else {"placement_policy": "auto", "memory_budget_bytes": budget}
    run = boost(folder, precision=precision, sizes=SIZES, min_chunk_bytes=min_chunk_bytes, **options)
    seen = [step(*run, number, max_norm=0.5) for number in range(4)]
    memory = run[1].gatherer.memory
    peak = memory.top.peak_bytes if memory.moves else 0  # whole parameters take what they take
    return seen, run[1].state_dict(), peak


@matrix(["None-1"], precision=[None, "bf16"], world_size=[1, 2])
@on_ranks("world_size")
def test_a_third_of_the_state_is_enough(precision, world_size, tmp_path):
    budget = state_of_all_ranks(16 if precision is None else 18) // 3 // world_size
    expected_seen, expected, _ = clipped_steps(None, precision, None)
    seen, state, peak = clipped_steps(str(tmp_path), precision, budget)  # in chunks as small as it asks
    assert peak <= budget
    assert seen == expected_seen
    assert_same_tensors(state, expected, EXACT)


@on_ranks(2)
def test_chunks_are_as_small_as_a_small_budget_asks(tmp_path):
    budget = state_of_all_ranks(18) // 3 // 2
    seen, _, peak = clipped_steps(str(tmp_path), "bf16", budget, 16 * 2**20)
    assert seen[-1][0] < seen[0][0]
    assert peak <= budget


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are listed on Linux")
@on_ranks(2)
def test_files_go_with_their_model(tmp_path):
    folder = str(tmp_path)

    def num_open():
        links = [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        return sum(link.startswith(folder) for link in links)

    run = boost(folder, **DISK)
    assert num_open() == 1
    step(*run)
    run[1].gatherer.memory.close()
    assert num_open() == 0
    gc.disable()  # references alone have to let go of them
    try:
        run = boost(folder, **DISK)
        step(*run)
        del run
        end = unhindered_seconds() + 10
        while num_open() and unhindered_seconds() < end:  # the disk's threads end a write first
            time.sleep(0.01)
        assert num_open() == 0
    finally:
        gc.enable()
