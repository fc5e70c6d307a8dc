"""Fault tolerance as a Booster plugin: replica groups around any other plugin, through torchft."""

from __future__ import annotations

from booster_ft.config import FaultToleranceConfig
from booster_ft.plugin import FaultTolerantPlugin

__all__ = ["FaultToleranceConfig", "FaultTolerantPlugin"]
