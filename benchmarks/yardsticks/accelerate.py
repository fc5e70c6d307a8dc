"""Accelerate: a training step, in which it wraps the model in ``DistributedDataParallel``, and checkpoints.

Its `save_state` writes on the first rank, and its `load_state` reads on every one.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import accelerate
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

NAME = f"Accelerate {accelerate.__version__}"
AGAINST = "ddp"


def make_step(model: nn.Module, batch: Any, precision: str | None) -> Callable[[], None]:
    """Return a step: forward, backward, clipping, fused AdamW.

    Collective: every rank.
    """
    accelerator = _accelerator(mixed_precision=precision or "no")
    wrapped, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))

    def step() -> None:
        accelerator.backward(wrapped(input_ids=batch, labels=batch).loss)
        accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_checkpoint(model: nn.Module, folder: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return functions that save and load a model and its AdamW state; a save ends with a sync.

    Args:
        model: The model.
        folder: Where the state goes.
    """
    accelerator = _accelerator()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    prepared = accelerator.prepare(model, optimizer)
    del prepared

    def save() -> None:
        accelerator.save_state(str(folder))
        if dist.get_rank() == 0:
            for path in folder.rglob("*"):
                if path.is_file():
                    descriptor = os.open(path, os.O_RDONLY)
                    try:
                        os.fsync(descriptor)
                    finally:
                        os.close(descriptor)
        dist.barrier()

    def load() -> None:
        accelerator.load_state(str(folder))

    return save, load


def _accelerator(**options: Any) -> accelerate.Accelerator:
    # It asks for what a launcher sets, and then uses the process group that is there.
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    accelerator = accelerate.Accelerator(cpu=True, **options)
    assert accelerator.num_processes == dist.get_world_size(), "or each rank would train alone"
    return accelerator
