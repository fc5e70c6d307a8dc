"""`FSDPConfig`: the options of the FSDP plugin, checked without a process group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from booster_core.errors import ConfigError
from booster_core.plugin import check_option_types

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """Options of the FSDP plugin.

    Args:
        reshard_after_forward: ``True`` reshards parameters after forward and gathers them again for backward, except
            those of the outermost unit and of the output head, which backward needs first, and an embedding's, which
            it does not need; ``False`` keeps all gathered; a number reshards to groups of that many ranks.
        unit_classes: Names of the module classes that are gathered as one unit.
        unit_min_numel: Smallest number of elements of a unit, not counting units inside it.
        unit_if: Called as ``unit_if(name, module)``; returns whether a module is a unit. The result must be the same on
            every rank. Only one of these three options may be given. By default, the layers of the model are its units:
            the classes that transformers lists as ``_no_split_modules``, or the larger members of ``ModuleList`` and
            ``Sequential``; and the embedding and the output head that a transformers model names, if they are large and
            not tied.
        ignored_modules: Qualified names, or class names, of modules whose parameters are replicated; their gradients
            are averaged.
        ignored_parameters: Qualified names of parameters that are replicated.
        replica_size: Number of replicas of the sharded model: it is sharded within groups of
            ``world_size / replica_size`` ranks, and gradients are averaged over the groups (hybrid sharding).
        shard_placement_fn: Called with each sharded parameter; returns ``Shard(dim)``, or ``None`` for the rows. A
            dimension other than the first one must be divisible by the number of ranks. See ``fully_shard``.
        mixed_precision: torch's policy, passed to ``fully_shard`` for each unit; its ``output_dtype`` is that of the
            model's outputs. Forward runs in its dtypes without autocast, and the run's precision follows from it.
        cpu_offload: Offload parameters, gradients and optimizer state to host memory, and step there. If forward
            runs on the CPU, they are in host memory already.
        forward_prefetch: Number of units to prefetch in forward, in the order of registration; 0 uses torch's default,
            which overlaps one on CUDA.
        backward_prefetch: Number of units to prefetch in backward, in reverse order; 0 uses torch's default, which
            prefetches one.
        max_norm: Clip gradients by this global norm in each step, unless ``clip_grad_by_norm`` was called before it;
            0 disables clipping.
        partition: ``"flat"`` lets the optimizer step on this rank's rows of each parameter, ``"parameter"`` gives it
            whole parameters, each on one rank; ``"auto"`` chooses by the optimizer's class, see
            `booster_runtime.sharding.elementwise`.
        broadcast_buffers: Broadcast, after each step, rank 0's values of buffers that forward changes, such as running
            statistics.
        forward_methods: Methods other than ``forward`` that use the model's parameters, such as ``"generate"``; a
            method that the model lacks raises. ``None`` uses ``generate`` if the model has it.

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
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None
    mixed_precision: MixedPrecisionPolicy | None = None
    cpu_offload: bool = False
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    max_norm: float = 0.0
    partition: str = "auto"
    broadcast_buffers: bool = True
    forward_methods: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("unit_classes", "ignored_modules", "ignored_parameters", "forward_methods"):
            names = getattr(self, name)
            if isinstance(names, str):
                msg = f"`{name}={names!r}` is one string; it is a sequence of names, such as ['{names}']."
                raise TypeError(msg)
            object.__setattr__(self, name, names if names is None else tuple(names))  # which is frozen
        check_option_types(self)
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
        chosen = ("unit_classes", "unit_min_numel", "unit_if")
        given = [name for name in chosen if getattr(self, name)]
        if len(given) > 1:
            msg = f"{' and '.join(f'`{name}`' for name in given)} all choose the units. Pass only one of them."
            raise ConfigError(msg)
