"""`HybridConfig`: the mesh and the options of each of its axes, checked without a process group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from booster_core.errors import ConfigError
from booster_hybrid.pipeline.schedule import STYLES

if TYPE_CHECKING:
    from booster_zero import ZeroConfig

SEQUENCE_MODES = ("split_gather", "all_to_all", "ring_attn")


@dataclass(frozen=True, kw_only=True)
class TensorConfig:
    """Tensor parallelism: each layer split over ranks.

    Args:
        size: Ranks over which a layer is split; 1 splits none.

    Raises:
        ConfigError: If the size is below 1.
    """

    size: int = 1

    def __post_init__(self) -> None:
        _check_positive("tensor size", self.size)


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Pipeline parallelism: consecutive layers on consecutive ranks.

    Args:
        size: Number of stages; 1 makes no pipeline.
        num_microbatches: Parts into which a batch is cut.
        style: Order of the parts' forwards and backwards: one of `booster_hybrid.pipeline.schedule.STYLES`.

    Raises:
        ConfigError: If a number is below 1, the style is unknown, or there are fewer microbatches than stages.
    """

    size: int = 1
    num_microbatches: int = 1
    style: str = "1f1b"

    def __post_init__(self) -> None:
        _check_positive("pipeline size", self.size)
        if self.style not in STYLES:
            msg = f"`pp_style={self.style!r}` is not one of {', '.join(map(repr, STYLES))}."
            raise ConfigError(msg)
        if self.num_microbatches < self.size:
            msg = (
                f"`num_microbatches={self.num_microbatches}` leaves some of the {self.size} stages idle throughout. "
                f"Use at least {self.size}."
            )
            raise ConfigError(msg)


@dataclass(frozen=True, kw_only=True)
class SequenceConfig:
    """Sequence parallelism: each sample's positions split over ranks.

    Args:
        size: Ranks over which a sequence is split; 1 splits none.
        mode: How attention sees the whole sequence: one of `SEQUENCE_MODES`, or ``None`` where none is split.
            ``"split_gather"`` uses the tensor parallel ranks and so takes no size of its own.

    Raises:
        ConfigError: If the size is below 1, the mode is unknown, or ``"split_gather"`` comes with a size.
    """

    size: int = 1
    mode: str | None = None

    def __post_init__(self) -> None:
        _check_positive("sequence size", self.size)
        if self.mode is not None and self.mode not in SEQUENCE_MODES:
            known = ", ".join(map(repr, SEQUENCE_MODES))
            msg = f"`sequence_parallelism_mode={self.mode!r}` is not one of {known}, or None."
            raise ConfigError(msg)
        if self.mode == "split_gather" and self.size > 1:
            msg = (
                f"'split_gather' splits over the tensor parallel ranks, but `sp_size={self.size}`. Use 1, or another "
                "mode."
            )
            raise ConfigError(msg)
        if self.mode is None and self.size > 1:
            msg = f"`sp_size={self.size}` needs a `sequence_parallelism_mode`: 'all_to_all' or 'ring_attn'."
            raise ConfigError(msg)


@dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """The mesh of a hybrid run; the data parallel size is what the other sizes leave of the world.

    Args:
        tensor: Tensor parallelism.
        pipeline: Pipeline parallelism.
        sequence: Sequence parallelism.
        zero: ZeRO over the data parallel ranks; ``None`` replicates the optimizer state on them.
    """

    tensor: TensorConfig = field(default_factory=TensorConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    sequence: SequenceConfig = field(default_factory=SequenceConfig)
    zero: ZeroConfig | None = None


def _check_positive(what: str, size: int) -> None:
    if size < 1:
        msg = f"The {what} {size} must be at least 1, which leaves that axis out."
        raise ConfigError(msg)
