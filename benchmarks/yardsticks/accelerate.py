"""A training step under Hugging Face Accelerate, which wraps the model in ``DistributedDataParallel``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import accelerate
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = f"Accelerate {accelerate.__version__}"
AGAINST = "ddp"


def make_step(model: torch.nn.Module, batch: Any, precision: str | None) -> Callable[[], None]:
    """Return a step: forward, backward, clipping, fused AdamW.

    Collective: every rank.
    """
    # By these it finds out that there are ranks, though the process group is there already.
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    os.environ.update(found)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision or "no")
    assert accelerator.num_processes == dist.get_world_size(), "or each rank would train alone"
    wrapped, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))

    def step() -> None:
        accelerator.backward(wrapped(input_ids=batch, labels=batch).loss)
        accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step
