"""`ZeroConfig`: the options of ZeRO stages 1 and 2, checked without a process group."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch

from booster_core.errors import ConfigError

_MOST_BYTES, _LEAST_BYTES, _BUCKETS = 25 * 2**20, 2**20, 8
"""Sizes of buckets where the user names none, and how many a small model has whose gradients are split."""
_WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """Options of ZeRO stages 1 and 2.

    Args:
        stage: 1 shards the optimizer state over the data parallel ranks; 2 shards the gradients as well, also while
            they accumulate under ``no_sync``.
        max_norm: Clip gradients by this global norm in each step before which ``clip_grad_by_norm`` was not called;
            0 does not.
        bucket_bytes: Size of the buckets in which gradients are reduced and parameters gathered, in bytes. A parameter
            that is larger has a bucket of its own. ``None`` for 25 MiB; in stage 2 for an eighth of all gradients
            where that is less, but at least 1 MiB: as a few buckets are underway at a time, larger ones would keep a
            small model's gradients whole.
        overlap_communication: Go on with backward while buckets are being reduced.
        communication_dtype: Format in which gradients travel, ``"fp32"``, ``"bf16"``, ``"fp16"`` or a dtype; ``None``
            for the parameters' own. CPUs sum in fp32 whatever travels; devices in the format that travels.
        overlap_allgather: Let ``step`` return while updated parameters are still being gathered; each is waited for
            on first use in the model's forward. See `booster_zero.gathers` for what waits, and what can't.
        cpu_offload: The same as ``offload="cpu"``.
        offload: ``"cpu"`` keeps optimizer state and the parameters that it updates on the host, and steps there, bucket
            by bucket; where forward runs on the CPU, they are there already. ``"disk"`` keeps elementwise optimizer
            state, and the masters or copies that it updates, in memory-mapped files of ``offload_dir``.
        offload_dir: An existing folder of each host for ``offload="disk"``, on a disk with room for the host's state.
            Files have no name there, and go with the process.
        master_weights: Keep fp32 masters of parameters whose working format is bf16 or fp16; without, the optimizer
            updates the working parameters.
        replica_size: Number of replicas of the sharded state: state is split within groups of
            ``world_size / replica_size`` ranks, gradients are averaged over the groups.
        partition: ``"flat"`` cuts parameters wherever that makes equal shares, ``"parameter"`` leaves them whole;
            ``"auto"`` does what the optimizer's class needs, see `booster_runtime.sharding.elementwise`.
        unused: ``"zero"`` lets a parameter that took no part in backward on this rank count as zero, and skips those
            that took none on any rank; ``"raise"`` raises at the step, naming them for each rank.
        broadcast_buffers: Give every rank, after each step, rank 0's values of buffers that forward changes, such as
            running statistics.

    Raises:
        ConfigError: If a value is out of range.
    """

    stage: int = 1
    max_norm: float = 0.0
    bucket_bytes: int | None = None
    overlap_communication: bool = True
    communication_dtype: torch.dtype | str | None = None
    overlap_allgather: bool = False
    cpu_offload: bool = False
    offload: str | None = None
    offload_dir: str | os.PathLike[str] | None = None
    master_weights: bool = True
    replica_size: int = 1
    partition: str = "auto"
    unused: str = "zero"
    broadcast_buffers: bool = True

    def __post_init__(self) -> None:
        if self.stage not in (1, 2):
            msg = f"`stage={self.stage}` is not one of 1 (optimizer state) and 2 (gradients too)."
            raise ConfigError(msg)
        if not 0 <= self.max_norm < math.inf:
            msg = f"`max_norm={self.max_norm}` must be 0 (no clipping) or the largest global norm of the gradients."
            raise ConfigError(msg)
        for name, meaning in (
            ("bucket_bytes", "the size of a bucket in bytes"),
            ("replica_size", "a number of replicas"),
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                msg = f"`{name}={value}` must be positive; it is {meaning}."
                raise ConfigError(msg)
        for name, known in (
            ("partition", ("auto", "flat", "parameter")),
            ("unused", ("zero", "raise")),
            ("offload", (None, "cpu", "disk")),
        ):
            if getattr(self, name) not in known:
                msg = f"`{name}={getattr(self, name)!r}` is not one of {', '.join(map(repr, known))}."
                raise ConfigError(msg)
        if self.communication_dtype is not None and self.wire_dtype is None:
            msg = (
                f"`communication_dtype={self.communication_dtype!r}` is not one of {', '.join(map(repr, _WIRES))}, "
                "or a torch dtype of these."
            )
            raise ConfigError(msg)
        self._check_offload()

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

    def bucket_bytes_for(self, gradient_bytes: int) -> int:
        """Return the size of the buckets of a model.

        Args:
            gradient_bytes: What all its gradients take as they travel, in bytes.
        """
        if self.bucket_bytes is not None:
            return self.bucket_bytes
        if self.stage == 1:
            return _MOST_BYTES  # fewer messages; there is nothing to save
        return min(_MOST_BYTES, max(gradient_bytes // _BUCKETS, _LEAST_BYTES))

    @property
    def offloads(self) -> bool:
        """Whether the optimizer steps on the host."""
        return self.cpu_offload or self.offload is not None

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """The format in which gradients travel; ``None`` for the parameters' own."""
        dtype = self.communication_dtype
        if isinstance(dtype, str):
            return _WIRES.get(dtype)
        return dtype if dtype in _WIRES.values() else None
