"""`HybridParallelPlugin`: tensor, pipeline, sequence and data parallelism behind `Booster`.

This version has the interface only: options are checked, and `configure` says that it does not train yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from booster_core.errors import PluginError
from booster_core.plugin import Capability, PipelinePlugin
from booster_core.precision import PrecisionPolicy
from booster_hybrid.config import HybridConfig, PipelineConfig, SequenceConfig, TensorConfig
from booster_zero import ZeroConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from booster_core.plugin import BoostContext, Boosted


class HybridParallelPlugin(PipelinePlugin):
    """Tensor, pipeline and sequence parallelism, with data parallelism over the ranks that these leave.

    This version does not train yet.

    Args:
        tp_size: Ranks over which each layer is split.
        pp_size: Number of pipeline stages.
        sp_size: Ranks over which each sequence is split.
        num_microbatches: See `PipelineConfig`; ``None`` means one for each stage.
        schedule: See `PipelineConfig`.
        sequence_mode: See `SequenceConfig`.
        zero_stage: 0 replicates the optimizer state over the data parallel ranks, 1 and 2 shard it by ZeRO.
        precision: Name or policy of the run's precision; the same as ``Booster(mixed_precision=...)``.

    Raises:
        ConfigError: If a value is out of range, or two contradict each other.

    Reference: Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053).
    """

    name: ClassVar[str] = "hybrid"
    available: ClassVar[bool] = False
    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {
            Capability.CPU,
            Capability.CUDA,
            Capability.FP32,
            Capability.BF16,
            Capability.FP16,
            Capability.LORA,
            Capability.PIPELINE,
            Capability.DATA_PARALLEL,
        }
    )

    def __init__(
        self,
        *,
        tp_size: int = 1,
        pp_size: int = 1,
        sp_size: int = 1,
        num_microbatches: int | None = None,
        schedule: str = "1f1b",
        sequence_mode: str = "split_gather",
        zero_stage: int = 0,
        precision: PrecisionPolicy | str | None = None,
    ) -> None:
        self.config = HybridConfig(
            tensor=TensorConfig(size=tp_size),
            pipeline=PipelineConfig(
                size=pp_size,
                num_microbatches=pp_size if num_microbatches is None else num_microbatches,
                schedule=schedule,
            ),
            sequence=SequenceConfig(size=sp_size, mode=sequence_mode),
            zero=None if zero_stage == 0 else ZeroConfig(stage=zero_stage),
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

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Callable[[Any, Any], Tensor],
        optimizer: Optimizer | None = None,
        *,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> Mapping[str, Any]:
        """Say that this version does not train.

        Raises:
            PluginError: Always.

        Collective: none; every rank raises.
        """
        del data_iter, model, criterion, optimizer, return_loss, return_outputs
        raise PluginError(_NOT_YET)


_NOT_YET = (
    "HybridParallelPlugin does not train yet: booster-hybrid 0.1 has its interface only. "
    "Use plugin='ddp' of booster-ddp, which keeps the whole model on every rank."
)
