"""`ZeroConfig`: the options of ZeRO's stages, checked without a process group."""

from __future__ import annotations

import os
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
            forward runs on the CPU, they are in host memory already. ``"disk"`` offloads elementwise optimizer state
            and masters to memory-mapped files in ``offload_dir``.
        offload_dir: An existing folder on each host for ``offload="disk"``, on a disk with space for the state of the
            host's ranks. The files are unlinked: they disappear with the process.

    Raises:
        ConfigError: If a value is out of range.
    """

    stage: int = 1
    bucket_bytes: int | None = None
    overlap_allgather: bool = False
    cpu_offload: bool = False
    offload: str | None = None
    offload_dir: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stage not in (1, 2, 3):
            msg = f"`stage={self.stage}` is not one of 1 (optimizer state), 2 (gradients too) and 3 (parameters too)."
            raise ConfigError(msg)
        self._check_positive("bucket_bytes", "the size of a bucket in bytes")
        self._check_known("offload", (None, "cpu", "disk"))
        self._check_offload()
        self._check_sharded()
        if self.cpu_offload:
            object.__setattr__(self, "offload", "cpu")

    def _check_offload(self) -> None:
        if self.cpu_offload and self.offload == "disk":
            msg = "`cpu_offload=True` and `offload='disk'` are two answers to one question. Give one of them."
            raise ConfigError(msg)
        if self.offload == "disk" and self.offload_dir is None:
            msg = "`offload='disk'` needs `offload_dir`, an existing folder on a disk with room for the state."
            raise ConfigError(msg)
        if self.offload_dir is None:
            return
        if not isinstance(self.offload_dir, (str, os.PathLike)):
            msg = f"`offload_dir` is the path of a folder; got `{type(self.offload_dir).__name__}`."
            raise TypeError(msg)
        if self.offload != "disk":
            msg = f"`offload_dir='{os.fspath(self.offload_dir)}'` is for `offload='disk'`; `offload={self.offload!r}`."
            raise ConfigError(msg)

    def _check_sharded(self) -> None:
        if self.stage == 3 and self.overlap_allgather:
            msg = (
                "`overlap_allgather=True` is for stages 1 and 2: stage 3 gathers no parameters in a step. Leave it out."
            )
            raise ConfigError(msg)
        if self.stage == 3 and self.offload == "disk":
            msg = "`offload='disk'` is for stages 1 and 2. Use `offload='cpu'`, or plugin='gemini' with `offload_dir`."
            raise ConfigError(msg)
