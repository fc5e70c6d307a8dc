"""`FSDPConfig`: the options of the FSDP plugin, checked without a process group."""

from __future__ import annotations

from dataclasses import dataclass

from booster_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """Options of ``torch.distributed.fsdp.fully_shard``.

    Args:
        reshard_after_forward: Free gathered parameters after forward and gather them again for backward; a number
            reshards to groups of that many ranks.
        unit_classes: Names of the module classes that are gathered as one unit; empty takes the model's layers.
        num_replicas: Groups of ranks that each hold a whole sharded model, gradients being averaged between them; 1
            shards over all ranks.
        cpu_offload: Keep parameters, gradients and optimizer state on the host outside of their use.

    Raises:
        ConfigError: If a number is out of range.
    """

    reshard_after_forward: bool | int = True
    unit_classes: tuple[str, ...] = ()
    num_replicas: int = 1
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.reshard_after_forward, bool) and self.reshard_after_forward < 2:
            msg = (
                f"`reshard_after_forward={self.reshard_after_forward}` is the size of a group of ranks and must be at "
                "least 2. Use True to reshard over all ranks and False to keep parameters gathered."
            )
            raise ConfigError(msg)
        if self.num_replicas < 1:
            msg = f"`num_replicas={self.num_replicas}` must be at least 1, which shards over all ranks."
            raise ConfigError(msg)
