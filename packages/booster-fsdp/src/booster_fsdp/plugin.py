"""`TorchFSDPPlugin`: ``torch.distributed.fsdp.fully_shard`` behind `Booster`.

This version has the interface only: options are checked, and `configure` says that it does not train yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from booster_core.errors import PluginError
from booster_core.plugin import Capability, Plugin
from booster_core.precision import PrecisionPolicy
from booster_fsdp.config import FSDPConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from booster_core.plugin import BoostContext, Boosted


class TorchFSDPPlugin(Plugin):
    """Fully sharded data parallelism: parameters, gradients and optimizer state split over all ranks by torch's FSDP2.

    This version does not train yet.

    Args:
        reshard_after_forward: See `FSDPConfig`, which documents this and the following options.
        unit_classes: Module classes gathered as one unit.
        num_replicas: Groups of ranks that each hold a whole model.
        cpu_offload: Keep state on the host.
        precision: Name or policy of the run's precision; the same as ``Booster(mixed_precision=...)``.

    Raises:
        ConfigError: If a value is out of range, or two contradict each other.

    Reference: Zhao et al. 2023, "PyTorch FSDP" (arXiv:2304.11277).
    """

    name: ClassVar[str] = "fsdp"
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
        reshard_after_forward: bool | int = True,
        unit_classes: Sequence[str] = (),
        num_replicas: int = 1,
        cpu_offload: bool = False,
        precision: PrecisionPolicy | str | None = None,
    ) -> None:
        self.config = FSDPConfig(
            reshard_after_forward=reshard_after_forward,
            unit_classes=tuple(unit_classes),
            num_replicas=num_replicas,
            cpu_offload=cpu_offload,
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
    "TorchFSDPPlugin does not train yet: booster-fsdp 0.1 has its interface only. "
    "Use plugin='ddp' of booster-ddp, which keeps the whole model on every rank."
)
