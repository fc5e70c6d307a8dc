"""A training step under Lightning Fabric's DDP strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning_fabric as fabric
import torch
import torch.distributed as dist
from lightning_fabric.plugins.environments import LightningEnvironment
from lightning_fabric.strategies import DDPStrategy

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = f"Lightning Fabric {fabric.__version__}"
AGAINST = "ddp"


class _Ranks(LightningEnvironment):
    """The ranks of the process group that there is."""

    @property
    def creates_processes_externally(self) -> bool:
        """Say that the processes run already."""
        return True

    def world_size(self) -> int:
        """Return the number of ranks."""
        return dist.get_world_size()

    def global_rank(self) -> int:
        """Return this rank."""
        return dist.get_rank()

    def local_rank(self) -> int:
        """Return this rank, as all are on one host."""
        return dist.get_rank()


def make_step(model: torch.nn.Module, batch: Any, precision: str | None) -> Callable[[], None]:
    """Return a step: forward, backward, clipping, fused AdamW.

    Collective: every rank.
    """
    strategy = DDPStrategy(cluster_environment=_Ranks())
    devices = dist.get_world_size()
    chosen: Any = "bf16-mixed" if precision == "bf16" else "32-true"
    runner = fabric.Fabric(accelerator="cpu", devices=devices, strategy=strategy, precision=chosen)
    runner.launch()
    wrapped, optimizer = runner.setup(model, torch.optim.AdamW(model.parameters(), fused=True))

    def step() -> None:
        runner.backward(wrapped(input_ids=batch, labels=batch).loss)
        runner.clip_gradients(wrapped, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step
