"""`LowLevelZeroPlugin`: ZeRO stages 1 and 2 behind `Booster`.

This version has the interface only: options are checked, and `configure` says that it does not train yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from booster_core.errors import PluginError
from booster_core.plugin import Capability, Plugin
from booster_core.precision import PrecisionPolicy
from booster_zero.config import ZeroConfig

if TYPE_CHECKING:
    from booster_core.plugin import BoostContext, Boosted


class LowLevelZeroPlugin(Plugin):
    """Data parallelism whose optimizer state (stage 1) and gradients (stage 2) are split over the ranks.

    This version does not train yet.

    Args:
        stage: See `ZeroConfig`, which documents this and the following options.
        bucket_bytes: Size of a bucket.
        overlap_communication: Communicate behind backward and forward.
        cpu_offload: Keep optimizer state on the host.
        precision: Name or policy of the run's precision; the same as ``Booster(mixed_precision=...)``.

    Raises:
        ConfigError: If a value is out of range, or two contradict each other.

    Reference: Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054).
    """

    name: ClassVar[str] = "zero"
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
        stage: int = 1,
        bucket_bytes: int = 25 * 2**20,
        overlap_communication: bool = True,
        cpu_offload: bool = False,
        precision: PrecisionPolicy | str | None = None,
    ) -> None:
        self.config = ZeroConfig(
            stage=stage, bucket_bytes=bucket_bytes, overlap_communication=overlap_communication, cpu_offload=cpu_offload
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
    "LowLevelZeroPlugin does not train yet: booster-zero 0.1 has its interface only. "
    "Use plugin='ddp' of booster-ddp, which keeps the whole model on every rank."
)
