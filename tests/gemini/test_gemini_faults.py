"""What can go wrong while chunks move: the error comes on every rank, says what to do, and nothing is lost."""

import contextlib
import errno
import gc
import os
import re
import resource
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from matrix import matrix
from patience import unhindered_seconds
from ranked import raises_on_ranks

from booster_core import Booster
from booster_core.errors import BudgetError, OffloadError
from booster_gemini import GeminiPlugin
from booster_testing import run_on_ranks
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


@contextlib.contextmanager
def full_disk(offset):
    """Let no file of this process grow beyond so many bytes after the start of the chunks' file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (offset, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def run_into_a_full_disk(folder, bad_rank, saved):
    """Fill the disk of one rank at the first step; save what there is, and go on."""
    booster, model, optimizer = boost(folder, **DISK)
    store = model.gatherer.memory.store
    limit = store._end + 30_000 if dist.get_rank() == bad_rank else resource.RLIM_INFINITY
    # States are made in the first step, and found no room for.
    with full_disk(limit), pytest.raises(OffloadError, match=r"needs \d+ more bytes, and .*Nothing is lost"):
        step(booster, model, optimizer)
    booster.save_model(model, f"{saved}/model", shard=True)
    booster.save_optimizer(optimizer, f"{saved}/optimizer", shard=True)
    losses = [step(booster, model, optimizer, number) for number in (1, 2)]
    return losses, model.state_dict()


def run_from(saved, is_loaded):
    booster, model, optimizer = boost(None)
    if is_loaded:
        booster.load_model(model, f"{saved}/model")
        booster.load_optimizer(optimizer, f"{saved}/optimizer")
    else:
        step(booster, model, optimizer)
    losses = [step(booster, model, optimizer, number) for number in (1, 2)]
    return losses, model.state_dict()


def test_a_full_disk_loses_nothing_and_the_step_can_be_saved(tmp_path):
    folder, saved = tmp_path / "disk", tmp_path / "saved"
    folder.mkdir()
    went_on = run_on_ranks(run_into_a_full_disk, 2, str(folder), 1, str(saved))
    loaded = run_on_ranks(run_from, 2, str(saved), True)
    undisturbed = run_on_ranks(run_from, 2, str(saved), False)
    for runs in (went_on, loaded):
        for (losses, state), (expected_losses, expected) in zip(runs, undisturbed, strict=True):
            assert losses == expected_losses
            assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


@raises_on_ranks(OffloadError, r"needs \d+ more bytes", 2)
def test_a_disk_that_is_full_at_boost_is_told_on_every_rank(tmp_path):
    folder = str(tmp_path)
    # Not a limit on the size of files, which the store by which ranks meet may be kept in.
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch("os.posix_fallocate", side_effect=full) if dist.get_rank() == 1 else contextlib.nullcontext():
        boost(folder, **DISK)


def losses_of(folder, options):
    run = boost(folder, **options)
    return [step(*run, number) for number in range(3)]


def steps(run, most):
    for number in range(most):
        step(*run, number)


def least_budget(folder):
    run = boost(folder, placement_policy="auto", memory_budget_bytes=12_000, min_chunk_bytes=512)
    with pytest.raises(BudgetError, match=r"is too small: .* needs \d+ bytes at once") as caught:
        steps(run, 4)
    return caught.value.least_bytes, str(caught.value)


def test_a_budget_that_is_too_small_names_the_least_that_does(tmp_path):
    told = run_on_ranks(least_budget, 2, str(tmp_path))
    least = max(bytes_ for bytes_, _ in told)
    assert all(
        re.search(r"`memory_budget_bytes=12000` is too small: (model\.\S+|lm_head|backward|step) ", message)
        for _, message in told
    )
    options = {"placement_policy": "auto", "memory_budget_bytes": least, "min_chunk_bytes": 512}
    assert run_on_ranks(losses_of, 2, str(tmp_path), options) == run_on_ranks(losses_of, 2, None, {})


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
def test_a_third_of_the_state_is_enough(precision, world_size, tmp_path):
    budget = state_of_all_ranks(16 if precision is None else 18) // 3 // world_size
    still = run_on_ranks(clipped_steps, world_size, None, precision, None)
    moved = run_on_ranks(clipped_steps, world_size, str(tmp_path), precision, budget)  # in chunks as small as it asks
    for (seen, state, peak), (expected_seen, expected, _) in zip(moved, still, strict=True):
        assert peak <= budget
        assert seen == expected_seen
        assert all(torch.equal(state[key], tensor) for key, tensor in expected.items())


def test_chunks_are_as_small_as_a_small_budget_asks(tmp_path):
    budget = state_of_all_ranks(18) // 3 // 2
    for seen, _, peak in run_on_ranks(clipped_steps, 2, str(tmp_path), "bf16", budget, 16 * 2**20):
        assert seen[-1][0] < seen[0][0]
        assert peak <= budget


def descriptors_after(folder):
    """Return how many files of a folder are open after models came and went, closed or not."""

    def count():
        links = [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        return sum(link.startswith(folder) for link in links)

    run = boost(folder, **DISK)
    during = count()
    step(*run)
    run[1].gatherer.memory.close()
    closed = count()
    gc.disable()  # references alone have to let go of them
    try:
        run = boost(folder, **DISK)
        step(*run)
        del run
        end = unhindered_seconds() + 10
        while (left := count()) and unhindered_seconds() < end:  # the disk's threads end a write first
            time.sleep(0.01)
        return during, closed, left
    finally:
        gc.enable()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are listed on Linux")
def test_files_go_with_their_model(tmp_path):
    assert run_on_ranks(descriptors_after, 2, str(tmp_path)) == [(1, 0, 0)] * 2
