"""A training step under DeepSpeed's ZeRO stage 1."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NAME = f"DeepSpeed {deepspeed.__version__}, ZeRO stage 1"
AGAINST = "zero"


def _engine(model: torch.nn.Module, settings: dict[str, Any]) -> Any:
    """Return DeepSpeed's engine of a model and fused AdamW; its collectives are compiled at the first use."""
    for name in ("RANK", "LOCAL_RANK"):  # which it reads from its launcher; all ranks are on one host
        os.environ.setdefault(name, str(dist.get_rank()))
    os.environ.setdefault("WORLD_SIZE", str(dist.get_world_size()))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    settings = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True, **settings}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    return engine


def make_step(model: torch.nn.Module, batch: Any, precision: str | None) -> Callable[[], None]:
    """Return a step: forward, backward, clipping, fused AdamW.

    Collective: every rank.
    """
    narrow = {"enabled": precision == "bf16"}
    engine = _engine(model, {"train_micro_batch_size_per_gpu": len(batch), "bf16": narrow, "gradient_clipping": 1.0})

    def step() -> None:
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()

    return step


def make_checkpoint(model: torch.nn.Module, folder: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return functions that save and load a model and its AdamW state, each rank its part of the state.

    A save ends when its files are on disk. The model's parameters become DeepSpeed's.

    Collective: every rank, as are the functions.
    """
    engine = _engine(model, {"train_micro_batch_size_per_gpu": 1})

    def save() -> None:
        engine.save_checkpoint(str(folder), tag="benchmark")
        for path in folder.rglob(f"*rank_{dist.get_rank()}_*"):
            _sync(path)
        if dist.get_rank() == 0:
            for path in folder.rglob("*model_states.pt"):
                _sync(path)
        dist.barrier()

    def load() -> None:
        engine.load_checkpoint(str(folder), tag="benchmark")

    return save, load


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
