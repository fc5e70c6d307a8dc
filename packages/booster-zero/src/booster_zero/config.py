"""`ZeroConfig`: the options of ZeRO stages 1 and 2, checked without a process group."""

from __future__ import annotations

from dataclasses import dataclass

from booster_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """Options of ZeRO stages 1 and 2.

    Args:
        stage: 1 shards the optimizer state over the data parallel ranks; 2 shards the gradients as well.
        bucket_bytes: Size of the buckets in which gradients are reduced and parameters gathered.
        overlap_communication: Reduce during backward and gather during the next forward.
        cpu_offload: Keep optimizer state and master parameters on the host, and step there.

    Raises:
        ConfigError: If ``stage`` is not 1 or 2, or the bucket is empty.
    """

    stage: int = 1
    bucket_bytes: int = 25 * 2**20
    overlap_communication: bool = True
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        if self.stage not in (1, 2):
            msg = f"`stage={self.stage}` is not one of 1 (optimizer state) and 2 (gradients too)."
            raise ConfigError(msg)
        if self.bucket_bytes < 1:
            msg = f"`bucket_bytes={self.bucket_bytes}` must be positive; it is the size of a gradient bucket in bytes."
            raise ConfigError(msg)
