"""`GeminiConfig`: the options of Gemini, checked without a process group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class GeminiConfig:
    """Options of parameters in chunks and of where the chunks lie.

    Args:
        chunk_bytes: Size of a chunk; ``None`` searches the one that wastes least.
        placement_policy: ``"static"`` places fixed fractions; ``"auto"`` keeps within budgets by next use; any other
            name is asked of the hook ``placement_policy``.
        offload_param_fraction: Fraction of the parameters kept off the device, for ``"static"``.
        offload_optim_fraction: Fraction of the optimizer state kept off the device, for ``"static"``.
        device_budget_bytes: Device memory that may be used, for ``"auto"``; ``None`` takes what is free.
        host_budget_bytes: Host memory that may be used, for ``"auto"``; ``None`` does not limit it.
        disk_path: Folder for chunks that fit neither device nor host; ``None`` uses no disk.

    Raises:
        ConfigError: If a value is out of range, or belongs to another placement policy.
    """

    chunk_bytes: int | None = None
    placement_policy: str = "static"
    offload_param_fraction: float = 0.0
    offload_optim_fraction: float = 0.0
    device_budget_bytes: int | None = None
    host_budget_bytes: int | None = None
    disk_path: str | Path | None = None

    def __post_init__(self) -> None:
        for name in ("chunk_bytes", "device_budget_bytes", "host_budget_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                msg = f"`{name}={value}` is a number of bytes and must be positive."
                raise ConfigError(msg)
        for name in ("offload_param_fraction", "offload_optim_fraction"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                msg = f"`{name}={value}` must lie between 0 (nothing) and 1 (all)."
                raise ConfigError(msg)
            if value and self.placement_policy == "auto":
                msg = f"`{name}={value}` is for placement_policy='static'; 'auto' takes `device_budget_bytes` instead."
                raise ConfigError(msg)
        for name in ("device_budget_bytes", "host_budget_bytes"):
            if getattr(self, name) is not None and self.placement_policy == "static":
                msg = (
                    f"`{name}={getattr(self, name)}` is for placement_policy='auto'; 'static' takes fractions instead."
                )
                raise ConfigError(msg)
