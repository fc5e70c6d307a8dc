"""`GeminiPlugin`: ZeRO-3 in chunks behind `Booster`.

This version has the interface only: options are checked, and `configure` says that it does not train yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from booster_core.errors import PluginError
from booster_core.plugin import Capability, Plugin
from booster_core.precision import PrecisionPolicy
from booster_gemini.config import GeminiConfig

if TYPE_CHECKING:
    from pathlib import Path

    from booster_core.plugin import BoostContext, Boosted


class GeminiPlugin(Plugin):
    """Data parallelism whose parameters, gradients and optimizer state lie in chunks, on device, host or disk.

    This version does not train yet.

    Args:
        chunk_bytes: See `GeminiConfig`, which documents this and the following options.
        placement_policy: Who decides where a chunk lies.
        offload_param_fraction: Parameters off the device.
        offload_optim_fraction: Optimizer state off the device.
        device_budget_bytes: Device memory that may be used.
        host_budget_bytes: Host memory that may be used.
        disk_path: Folder for the rest.
        precision: Name or policy of the run's precision; the same as ``Booster(mixed_precision=...)``.

    Raises:
        ConfigError: If a value is out of range, or two contradict each other.

    Reference: Fang et al. 2022, "Parallel Training of Pre-Trained Models via Chunk-Based Dynamic Memory Management"
    (arXiv:2108.05818).
    """

    name: ClassVar[str] = "gemini"
    available: ClassVar[bool] = False
    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {
            Capability.CPU,
            Capability.CUDA,
            Capability.FP32,
            Capability.BF16,
            Capability.FP16,
            Capability.LORA,
            Capability.DATA_PARALLEL,
        }
    )

    def __init__(
        self,
        *,
        chunk_bytes: int | None = None,
        placement_policy: str = "static",
        offload_param_fraction: float = 0.0,
        offload_optim_fraction: float = 0.0,
        device_budget_bytes: int | None = None,
        host_budget_bytes: int | None = None,
        disk_path: str | Path | None = None,
        precision: PrecisionPolicy | str | None = None,
    ) -> None:
        self.config = GeminiConfig(
            chunk_bytes=chunk_bytes,
            placement_policy=placement_policy,
            offload_param_fraction=offload_param_fraction,
            offload_optim_fraction=offload_optim_fraction,
            device_budget_bytes=device_budget_bytes,
            host_budget_bytes=host_budget_bytes,
            disk_path=disk_path,
        )
        self.precision = None if precision is None else PrecisionPolicy.parse(precision)

    def configure(self, objects: Boosted, context: BoostContext) -> Boosted:
        """Say that this version does not train.

        Raises:
            PluginError: Always.

        Collective: none; every rank raises.
        """
        del objects, context
        raise PluginError(_NOT_YET)


_NOT_YET = (
    "GeminiPlugin does not train yet: booster-gemini 0.1 has its interface only. "
    "Use plugin='ddp' of booster-ddp, which keeps the whole model on every rank."
)
