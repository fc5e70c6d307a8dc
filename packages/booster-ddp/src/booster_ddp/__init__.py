"""Data parallelism as a Booster plugin, through ``torch.nn.parallel.DistributedDataParallel``."""

from __future__ import annotations

from booster_ddp.config import DDPConfig
from booster_ddp.plugin import TorchDDPPlugin

__all__ = ["DDPConfig", "TorchDDPPlugin"]
