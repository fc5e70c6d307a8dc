"""How the data parallel ranks share their work: replicas that average gradients, or ZeRO, which splits the state."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from booster_core.errors import ConfigError
from booster_zero import ZeroConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig:
    """Options of data parallelism where each rank keeps all of the optimizer state, ``zero_stage=0``.

    Args:
        bucket_bytes: Size of the buckets in which gradients are averaged, in bytes; ``None`` for 25 MiB. A parameter
            that is larger has a bucket of its own.
        overlap_communication: Average gradients during backward.
        communication_dtype: Dtype in which gradients are sent: ``"fp32"``, ``"bf16"`` (half the bytes of fp32),
            ``"fp16"`` or a torch dtype; ``None`` uses that of the parameters. CPUs always sum in fp32, devices in this
            dtype.
        master_weights: Keep fp32 masters of bf16 and fp16 parameters; if False, the optimizer updates the working
            parameters.
        unused: ``"zero"`` gives a parameter that this rank did not use a zero gradient, and skips those that no rank
            used; ``"raise"`` raises at the step and names them by rank.
        broadcast_buffers: Broadcast, after each step, the first data parallel rank's values of buffers that forward
            changes, such as running statistics.

    Raises:
        ConfigError: If a value is out of range.

    Reference: Li et al. 2020, "PyTorch Distributed" (arXiv:2006.15704).
    """

    bucket_bytes: int | None = None
    overlap_communication: bool = True
    communication_dtype: torch.dtype | str | None = None
    master_weights: bool = True
    unused: str = "zero"
    broadcast_buffers: bool = True

    def __post_init__(self) -> None:
        self.with_norm(0.0)  # which refuses what is out of range

    def with_norm(self, max_norm: float) -> ZeroConfig:
        """Return the options for ZeRO's machinery, which does the work with one shard for each rank.

        Args:
            max_norm: Clip gradients by this global norm in each step; 0 does not.

        Raises:
            ConfigError: If a value is out of range.
        """
        return ZeroConfig(max_norm=max_norm, **asdict(self))


def zero_options(zero: ZeroConfig | None, zero_stage: int, max_norm: float, *, cpu_offload: bool) -> ZeroConfig | None:
    """Return ZeRO's options, given as one or one by one; ``None`` where nothing is sharded.

    Args:
        zero: All of them.
        zero_stage: ZeRO's stage; 0 shards nothing.
        max_norm: Global norm to clip by.
        cpu_offload: Whether state is kept on the host.

    Raises:
        ConfigError: If options are given in both ways, or ask for what can't be.
    """
    if zero is None:
        if zero_stage not in (0, 1, 2, 3):
            msg = (
                f"`zero_stage={zero_stage}` is not one of 0 (each rank keeps all of the state), 1 (optimizer state is "
                "split over the data parallel ranks), 2 (gradients too) and 3 (parameters too)."
            )
            raise ConfigError(msg)
        if cpu_offload and zero_stage == 0:
            msg = "`cpu_offload=True` moves what ZeRO shards, and `zero_stage=0` shards nothing. Use `zero_stage=1`."
            raise ConfigError(msg)
        return ZeroConfig(stage=zero_stage, max_norm=max_norm, cpu_offload=cpu_offload) if zero_stage else None
    given = {"zero_stage": zero_stage, "max_norm": max_norm, "cpu_offload": cpu_offload}
    doubled = [name for name, value in given.items() if value]
    if doubled:
        msg = f"`zero=ZeroConfig(...)` says what `{doubled[0]}={given[doubled[0]]}` says, too. Give one of them."
        raise ConfigError(msg)
    return zero
