"""Fully sharded data parallelism through ``torch.distributed.fsdp.fully_shard``, as a plugin of Booster."""

from __future__ import annotations

from booster_fsdp.config import FSDPConfig
from booster_fsdp.plugin import TorchFSDPPlugin

__all__ = ["FSDPConfig", "TorchFSDPPlugin"]
