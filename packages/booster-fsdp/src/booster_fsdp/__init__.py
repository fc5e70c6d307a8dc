"""Fully sharded data parallelism as a Booster plugin, through ``torch.distributed.fsdp.fully_shard``."""

from __future__ import annotations

from booster_fsdp.config import FSDPConfig
from booster_fsdp.plugin import TorchFSDPPlugin

__all__ = ["FSDPConfig", "TorchFSDPPlugin"]
