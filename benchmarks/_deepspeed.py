"""DeepSpeed's save and load of a training state, as a column of a benchmark; DeepSpeed is no dependency."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch
    from torch import nn


def deepspeed_calls(
    build: Callable[[], tuple[nn.Module, torch.optim.Optimizer]], folder: Path
) -> tuple[Callable[[], object], Callable[[], object]] | None:
    """Return functions that save and load the same state with DeepSpeed; ``None`` where it is not installed.

    Collective: every rank, and so are the functions.
    """
    if importlib.util.find_spec("deepspeed") is None:
        return None
    import deepspeed

    model, optimizer = build()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_force_ds_cpu_optimizer": False}
    engine: Any
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def save() -> None:
        engine.save_checkpoint(str(folder), tag="bench")
        dist.barrier()

    def load() -> None:
        engine.load_checkpoint(str(folder), tag="bench")

    return save, load
