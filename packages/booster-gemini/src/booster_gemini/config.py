"""`GeminiConfig`: the options of Gemini, checked without a process group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

_WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class GeminiConfig:
    """Options of Gemini.

    Args:
        placement_policy: ``"static"`` keeps fixed fractions away from the memory that computes; ``"auto"`` keeps within
            a budget, by furthest next use; any other name is asked of the hook ``placement_policy``.
        offload_param_frac: Fraction of the parameters that lie elsewhere while they are not in use, for ``"static"``.
        offload_optim_frac: Fraction of the optimizer state that lies elsewhere, for ``"static"``. On an accelerator it
            is stepped on where it lies, on the host.
        memory_budget_bytes: What chunks, gradients and optimizer state may take of the memory that computes, on each
            rank, for ``"auto"``; activations come on top. ``None`` takes what is free on an accelerator.
        host_budget_bytes: What they may take of the host's memory beneath an accelerator, where ``offload_dir`` takes
            the rest; ``None`` sends everything there.
        offload_dir: Folder on a disk for what lies elsewhere. On the CPU the disk is the only elsewhere; on an
            accelerator ``None`` means the host's memory.
        pin_memory: Lock the host's pages, so that an accelerator copies them by itself.
        memory_record: Folder into which each rank writes what lay where, for ``booster memory``; ``None`` writes
            nothing.
        shard_param_frac: Fraction of the parameters that are whole only while they are used; the rest stays whole from
            its first use until the next step, which takes more memory and fewer gathers. 0 is what ZeRO-2 does.
        min_chunk_bytes: Smallest size of a chunk in bytes; the first size up to four times as large that wastes next
            to nothing is taken. A parameter that is larger has a chunk of its own. Where ``memory_budget_bytes`` does
            not hold the state of three such chunks, they are smaller.
        max_prefetch: How many chunks are gathered ahead of their use, at most, and no more than a quarter of
            ``memory_budget_bytes`` holds; 0 waits for each.
        max_norm: Clip gradients by this global norm in each step before which ``clip_grad_by_norm`` was not called;
            0 does not.
        overlap_communication: Go on with backward while chunks' gradients are being reduced.
        communication_dtype: Format in which gradients travel, ``"fp32"``, ``"bf16"``, ``"fp16"`` or a dtype; ``None``
            for the parameters' own. CPUs sum in fp32 whatever travels; devices in the format that travels.
        master_weights: Keep fp32 masters of parameters whose working format is bf16 or fp16; without, the optimizer
            updates the working parameters.
        replica_size: Number of replicas of the sharded state: state is split within groups of
            ``world_size / replica_size`` ranks, gradients are averaged over the groups.
        partition: ``"flat"`` cuts parameters wherever that makes equal shares, ``"parameter"`` leaves them whole;
            ``"auto"`` does what the optimizer's class needs, see `booster_runtime.sharding.elementwise`.
        unused: ``"zero"`` lets a parameter that took no part in backward on this rank count as zero, and skips those
            that took none on any rank; ``"raise"`` raises at the step, naming them for each rank.
        debug: Look for parameters that are changed by hand, whose new values would be lost, and raise at the next
            forward, backward or step, naming them. Takes the time to read all parameters whenever they are gathered
            and released.
        broadcast_buffers: Give every rank, after each step, rank 0's values of buffers that forward changes, such as
            running statistics.

    Raises:
        ConfigError: If a value is out of range.
    """

    placement_policy: str = "static"
    offload_param_frac: float = 0.0
    offload_optim_frac: float = 0.0
    memory_budget_bytes: int | None = None
    host_budget_bytes: int | None = None
    offload_dir: str | Path | None = None
    pin_memory: bool = True
    memory_record: str | Path | None = None
    shard_param_frac: float = 1.0
    min_chunk_bytes: int = 16 * 2**20
    max_prefetch: int = 1
    max_norm: float = 0.0
    overlap_communication: bool = True
    communication_dtype: torch.dtype | str | None = None
    master_weights: bool = True
    replica_size: int = 1
    partition: str = "auto"
    unused: str = "zero"
    debug: bool = False
    broadcast_buffers: bool = True

    def __post_init__(self) -> None:
        self._check_placement()
        if not 0 <= self.shard_param_frac <= 1:
            msg = f"`shard_param_frac={self.shard_param_frac}` must lie between 0 (none) and 1 (all parameters)."
            raise ConfigError(msg)
        if not 0 <= self.max_norm < math.inf:
            msg = f"`max_norm={self.max_norm}` must be 0 (no clipping) or the largest global norm of the gradients."
            raise ConfigError(msg)
        for name, meaning in (
            ("min_chunk_bytes", "the size of a chunk in bytes"),
            ("replica_size", "a number of replicas"),
        ):
            if getattr(self, name) < 1:
                msg = f"`{name}={getattr(self, name)}` must be positive; it is {meaning}."
                raise ConfigError(msg)
        if self.max_prefetch < 0:
            msg = f"`max_prefetch={self.max_prefetch}` must be 0 (none) or a number of chunks."
            raise ConfigError(msg)
        for name, known in (("partition", ("auto", "flat", "parameter")), ("unused", ("zero", "raise"))):
            if getattr(self, name) not in known:
                msg = f"`{name}={getattr(self, name)!r}` is not one of {', '.join(map(repr, known))}."
                raise ConfigError(msg)
        if self.communication_dtype is not None and self.wire_dtype is None:
            msg = (
                f"`communication_dtype={self.communication_dtype!r}` is not one of {', '.join(map(repr, _WIRES))}, "
                "or a torch dtype of these."
            )
            raise ConfigError(msg)

    def _check_placement(self) -> None:
        is_static = self.placement_policy == "static"
        for name in ("offload_param_frac", "offload_optim_frac"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                msg = f"`{name}={value}` must lie between 0 (nothing) and 1 (all)."
                raise ConfigError(msg)
            if value and not is_static:
                msg = (
                    f"`{name}={value}` is for placement_policy='static', and this is {self.placement_policy!r}, which "
                    "takes `memory_budget_bytes` instead."
                )
                raise ConfigError(msg)
        for name in ("memory_budget_bytes", "host_budget_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                msg = f"`{name}={value}` is a number of bytes and must be positive."
                raise ConfigError(msg)
        if self.memory_budget_bytes is not None and is_static:
            msg = (
                f"`memory_budget_bytes={self.memory_budget_bytes}` is for placement_policy='auto'; 'static' takes "
                "`offload_param_frac` and `offload_optim_frac` instead."
            )
            raise ConfigError(msg)
        if self.host_budget_bytes is not None and self.offload_dir is None:
            msg = (
                f"`host_budget_bytes={self.host_budget_bytes}` leaves the rest no place. Pass `offload_dir`, a folder "
                "on a disk."
            )
            raise ConfigError(msg)
        if self.offload_dir is not None and is_static and not (self.offload_param_frac or self.offload_optim_frac):
            msg = (
                f"`offload_dir='{self.offload_dir}'` would stay empty. Pass `offload_param_frac`, "
                "`offload_optim_frac`, or placement_policy='auto' with `memory_budget_bytes`."
            )
            raise ConfigError(msg)

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """The format in which gradients travel; ``None`` for the parameters' own."""
        dtype = self.communication_dtype
        if isinstance(dtype, str):
            return _WIRES.get(dtype)
        return dtype if dtype in _WIRES.values() else None
