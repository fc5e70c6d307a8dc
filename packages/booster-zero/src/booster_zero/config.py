"""`ZeroConfig`: the options of ZeRO's stages, checked without a process group."""

from __future__ import annotations

from dataclasses import dataclass

from booster_core.errors import ConfigError
from booster_zero.engine.options import ShardingOptions


@dataclass(frozen=True, kw_only=True)
class ZeroConfig(ShardingOptions):
    """Options of ZeRO; `ShardingOptions` documents those that are not here.

    Args:
        stage: 1 shards the optimizer state over the data parallel ranks; 2 shards the gradients as well, also while
            they accumulate under ``no_sync``. 3, of hybrid parallelism alone, shards parameters, too.
        bucket_bytes: Size in bytes of the buckets in which gradients are reduced and parameters gathered. A larger
            parameter has a bucket of its own. ``None`` is 25 MiB; from stage 2 on at most an eighth of all gradients,
            and at least 1 MiB: a few buckets exist at a time, and larger ones would hold all gradients of a small
            model. Over more than 100 ranks it is 256 KiB for each rank, up to an eighth of all gradients.
        overlap_allgather: Let ``step`` return while updated parameters are gathered; the first use of each waits for
            it. Reads by views that a script has made before the step don't wait.
        cpu_offload: The same as ``offload="cpu"``, which it sets.
        offload: ``"cpu"`` offloads optimizer state and masters to host memory and steps there, bucket by bucket; if
            forward runs on the CPU, they are in host memory already. Gemini offloads to disks.

    Raises:
        ConfigError: If a value is out of range.
    """

    stage: int = 1
    bucket_bytes: int | None = None
    overlap_allgather: bool = False
    cpu_offload: bool = False
    offload: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stage not in (1, 2, 3):
            msg = f"`stage={self.stage!r}` is not one of 1 (optimizer state), 2 (gradients too) and 3 (parameters too)."
            raise ConfigError(msg)
        self._check_positive("bucket_bytes", "the size of a bucket in bytes")
        if self.offload == "disk":
            msg = (
                "`offload='disk'`: ZeRO keeps state in memory. Use plugin='gemini' with `shard_param_frac=0.0`, "
                "`offload_optim_frac=1.0` and `offload_dir=`, a folder on a disk: it gathers parameters once a step, "
                "too, and keeps optimizer state and masters there."
            )
            raise ConfigError(msg)
        self._check_known("offload", (None, "cpu"))
        self._check_sharded()
        if self.cpu_offload:
            object.__setattr__(self, "offload", "cpu")

    def _check_sharded(self) -> None:
        if self.stage == 3 and self.overlap_allgather:
            msg = (
                "`overlap_allgather=True` is for stages 1 and 2: stage 3 gathers no parameters in a step. Leave it out."
            )
            raise ConfigError(msg)
