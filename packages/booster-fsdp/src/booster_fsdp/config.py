"""`FSDPConfig`: the options of the FSDP plugin, checked without a process group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """Options of the FSDP plugin.

    Args:
        reshard_after_forward: ``True`` frees gathered parameters after forward and gathers them again for backward,
            except those of the outermost unit, which backward needs at once; ``False`` keeps all gathered; a number
            reshards to groups of that many ranks.
        unit_classes: Names of the module classes that are gathered as one unit.
        unit_min_numel: Gather modules as one unit as soon as they have this many elements outside of smaller units.
        unit_if: Called as ``unit_if(name, module)``; says whether a module is a unit. Must answer alike on every rank.
            Of these three, one may be given; without any, the layers of the model are its units: what transformers
            lists as ``_no_split_modules``, or the larger members of ``ModuleList`` and ``Sequential``.
        ignored_modules: Qualified names, or class names, of modules whose parameters every rank keeps whole; their
            gradients are averaged.
        ignored_parameters: Qualified names of parameters that every rank keeps whole.
        replica_size: Number of replicas of the sharded model: it is split within groups of
            ``world_size / replica_size`` ranks, gradients are averaged over the groups (hybrid sharding).
        cpu_offload: Keep parameters, gradients and optimizer state on the host, and step there. Where forward runs
            on the CPU, they are there already.
        forward_prefetch: How many units to gather ahead in forward, in the order of registration; 0 leaves it to
            torch, which overlaps one on CUDA.
        backward_prefetch: How many units to gather ahead in backward, in reverse order; 0 leaves it to torch, which
            gathers the one before.
        max_norm: Clip gradients by this global norm in each step before which ``clip_grad_by_norm`` was not called;
            0 does not.
        partition: ``"flat"`` lets the optimizer step on this rank's rows of each parameter, ``"parameter"`` gives it
            whole parameters, each on one rank; ``"auto"`` does what the optimizer's class needs, see
            `booster_runtime.sharding.elementwise`.
        broadcast_buffers: Give every rank, after each step, rank 0's values of buffers that forward changes, such as
            running statistics.
        forward_methods: Methods of the model besides ``forward`` that use its parameters, such as ``"generate"``; a
            method that the model lacks raises. ``None`` takes ``generate`` where there is one.

    Raises:
        ConfigError: If a value is out of range, or two contradict each other.
    """

    reshard_after_forward: bool | int = True
    unit_classes: tuple[str, ...] = ()
    unit_min_numel: int | None = None
    unit_if: Callable[[str, nn.Module], bool] | None = None
    ignored_modules: tuple[str, ...] = ()
    ignored_parameters: tuple[str, ...] = ()
    replica_size: int = 1
    cpu_offload: bool = False
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    max_norm: float = 0.0
    partition: str = "auto"
    broadcast_buffers: bool = True
    forward_methods: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.reshard_after_forward, bool) and self.reshard_after_forward < 2:
            msg = (
                f"`reshard_after_forward={self.reshard_after_forward}` is the size of a group of ranks and must be at "
                "least 2. Use True to reshard over all ranks and False to keep parameters gathered."
            )
            raise ConfigError(msg)
        for name, least, meaning in (
            ("replica_size", 1, "a number of replicas"),
            ("unit_min_numel", 1, "a number of elements"),
            ("forward_prefetch", 0, "a number of units"),
            ("backward_prefetch", 0, "a number of units"),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                msg = f"`{name}={value}` must be at least {least}; it is {meaning}."
                raise ConfigError(msg)
        if not 0 <= self.max_norm < math.inf:
            msg = f"`max_norm={self.max_norm}` must be 0 (no clipping) or the largest global norm of the gradients."
            raise ConfigError(msg)
        if self.partition not in ("auto", "flat", "parameter"):
            msg = f"`partition={self.partition!r}` is not one of 'auto', 'flat', 'parameter'."
            raise ConfigError(msg)
        given = [
            name
            for name, is_given in (
                ("unit_classes", bool(self.unit_classes)),
                ("unit_min_numel", self.unit_min_numel is not None),
                ("unit_if", self.unit_if is not None),
            )
            if is_given
        ]
        if len(given) > 1:
            msg = f"{' and '.join(f'`{name}`' for name in given)} are two answers to one question. Give one of them."
            raise ConfigError(msg)
