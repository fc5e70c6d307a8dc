"""Hundreds of steps keep nothing: no memory, hooks, threads, open files or process groups."""

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hybrid_runs import RING, SPLIT_GATHER
from ranked import on_ranks

from booster_core import Booster
from booster_hybrid import HybridParallelPlugin
from booster_testing.memory import peak_memory
from booster_testing.models import tiny_llama

MESHES = {
    "tp2pp2": (4, {"tp_size": 2, "pp_size": 2}),
    "zbv": (2, {"pp_size": 2, "pp_style": "zbv"}),
    "pp2zero2": (4, {"pp_size": 2, "zero_stage": 2}),
    "ring": (2, RING),
    "split_gather": (2, SPLIT_GATHER),
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@on_ranks(lambda mesh: MESHES[mesh][0], timeout_seconds=240)
def test_memory_does_not_grow_in_hundreds_of_steps(mesh):
    _, options = MESHES[mesh]
    torch.manual_seed(3)
    model = tiny_llama(num_hidden_layers=4)
    booster = Booster(plugin=HybridParallelPlugin(**options))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-4))

    def train(steps):
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(64, (4, 8 + step % 5), generator=generator)  # of several lengths
            batch = {"input_ids": tokens, "labels": tokens}
            if "pp_size" in options:
                booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)
            else:
                booster.backward(model(**batch).loss, optimizer)
            optimizer.clip_grad_by_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()

    def counted():
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

    train(100)  # malloc finds its final size
    before = counted()
    with peak_memory() as used:
        train(300)
    assert counted() == before
    # A microbatch's hidden states kept in each step would be 1 MiB over all; allocators settle within two.
    assert used.kept_bytes < 2**21
