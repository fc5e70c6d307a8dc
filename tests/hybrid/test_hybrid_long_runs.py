"""Hundreds of steps keep nothing: no memory, hooks, threads, open files or process groups."""

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from booster_core import Booster
from booster_hybrid import HybridParallelPlugin
from booster_testing import run_on_ranks
from booster_testing.memory import peak_memory
from booster_testing.models import tiny_llama

WARM_UP, STEPS = 100, 300
MESHES = {
    "tp2pp2": (4, {"tp_size": 2, "pp_size": 2}),
    "zbv": (2, {"pp_size": 2, "pp_style": "zbv"}),
    "pp2zero2": (4, {"pp_size": 2, "zero_stage": 2}),
    "ring": (2, {"sp_size": 2, "sequence_parallelism_mode": "ring_attn"}),
    "split_gather": (2, {"tp_size": 2, "sequence_parallelism_mode": "split_gather"}),
}


def boosted(options):
    torch.manual_seed(3)
    model = tiny_llama(num_hidden_layers=4)
    booster = Booster(plugin=HybridParallelPlugin(**options))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    return booster, model, optimizer


def train(booster, model, optimizer, steps):
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(64, (4, 8 + step % 5), generator=generator)  # of several lengths
        batch = {"input_ids": tokens, "labels": tokens}
        if booster.plugin.config.pipeline.size > 1:
            booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)
        else:
            booster.backward(model(**batch).loss, optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()


def counted(model, optimizer):
    modules, parameters = list(model.unwrap().modules()), list(model.unwrap().parameters())
    return {
        "hooks of modules": sum(
            len(each._forward_hooks) + len(each._forward_pre_hooks) + len(each._backward_hooks) for each in modules
        ),
        "hooks of parameters": sum(
            len(each._post_accumulate_grad_hooks or ()) + len(each._backward_hooks or ()) for each in parameters
        ),
        "threads": threading.active_count(),
        "open files": len(list(Path("/proc/self/fd").iterdir())),
        "states": len(optimizer.state),
        "groups": len(dist.distributed_c10d._world.pg_map),
    }


def many_steps(options):
    booster, model, optimizer = boosted(options)
    train(booster, model, optimizer, WARM_UP)  # malloc finds its final size
    before = counted(model, optimizer)
    with peak_memory() as used:
        train(booster, model, optimizer, STEPS)
    return before, counted(model, optimizer), used.kept_bytes


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_memory_does_not_grow_in_hundreds_of_steps(mesh):
    num_ranks, options = MESHES[mesh]
    for before, after, kept_bytes in run_on_ranks(many_steps, num_ranks, options, timeout_seconds=240):
        assert after == before
        # A microbatch's hidden states kept in each step would be 1 MiB over all; allocators settle within two.
        assert kept_bytes < 2**21
