"""Accelerate's checkpoints of a replicated model: `save_state` on the first rank, `load_state` on every rank."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from accelerate import Accelerator

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

NAME = "Accelerate"


def make_checkpoint(model: nn.Module, folder: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return functions that save and load a model and its AdamW state; a save ends with a sync.

    Args:
        model: The model.
        folder: Where the state goes.
    """
    # Accelerate asks for what a launcher sets, and then uses the process group that is there.
    ranks, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=ranks, LOCAL_RANK=ranks, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    accelerator = Accelerator(cpu=True)
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
