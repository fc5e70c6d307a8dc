"""`GeminiConfig`: the options of Gemini, checked without a process group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from booster_core.errors import ConfigError
from booster_zero.engine import ShardingOptions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class GeminiConfig(ShardingOptions):
    """Options of Gemini; `ShardingOptions` documents those that are not here.

    Args:
        placement_policy: ``"static"`` offloads fixed fractions; ``"auto"`` keeps within a budget, and offloads the
            chunk whose next use is furthest away; any other name is asked of the hook ``placement_policy``.
        offload_param_frac: Fraction of the parameters that are offloaded while they are not in use, for ``"static"``.
        offload_optim_frac: Fraction of the optimizer state that is offloaded, for ``"static"``. On an accelerator it is
            stepped on where it is, on the host.
        memory_budget_bytes: Device memory that Gemini may use on each rank for parameters, gradients and optimizer
            state, for ``"auto"``; activations come on top. ``None`` takes what is free on an accelerator.
        host_budget_bytes: Host memory that they may use under an accelerator, where ``offload_dir`` takes the rest;
            ``None`` sends everything there.
        offload_dir: Folder on a disk for what is offloaded. On CPU runs, disk is the only offload target; on an
            accelerator ``None`` offloads to the host's memory.
        pin_memory: Lock the host's pages, so that an accelerator copies them by itself.
        memory_record: Folder into which each rank writes where everything was, for ``booster memory``; ``None`` writes
            nothing.
        shard_param_frac: Fraction of the parameters that are whole only while they are used; the rest stays whole from
            its first use until the next step, which takes more memory and fewer gathers. 0 is what ZeRO-2 does.
        min_chunk_bytes: Smallest size of a chunk in bytes; the first size up to four times as large that wastes next
            to nothing is taken. A parameter that is larger has a chunk of its own. Where ``memory_budget_bytes`` does
            not hold the state of three such chunks, they are smaller.
        max_prefetch: How many chunks are gathered ahead of their use, at most, and no more than a quarter of
            ``memory_budget_bytes`` holds; 0 waits for each.
        leaf_modules: Modules whose parameters are gathered as one while they run, by class, name of a class, or path:
            those in which the data chooses what is used, such as the experts of a mixture. A list of modules counts
            as a part of the module that runs it. Takes memory for all parameters of such a module at once.
        debug: Look for parameters that are changed by hand, whose new values would be lost, and raise at the next
            forward, backward or step, naming them. The first forwards, backward passes and steps look at some values
            of each parameter anyway; this looks at all of them, always, which takes the time to read them whenever
            they are gathered and released.

    Raises:
        ConfigError: If a value is out of range.
        TypeError: If ``leaf_modules`` is no list of classes and names.
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
    leaf_modules: Sequence[str | type[nn.Module]] = ()
    debug: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_placement()
        if not 0 <= self.shard_param_frac <= 1:
            msg = f"`shard_param_frac={self.shard_param_frac}` must be between 0 (none) and 1 (all parameters)."
            raise ConfigError(msg)
        self._check_positive("min_chunk_bytes", "the size of a chunk in bytes")
        self._check_leaf_modules()
        if self.max_prefetch < 0:
            msg = f"`max_prefetch={self.max_prefetch}` must be 0 (none) or a number of chunks."
            raise ConfigError(msg)

    def _check_leaf_modules(self) -> None:
        if isinstance(self.leaf_modules, (str, type)):
            msg = f"`leaf_modules={self.leaf_modules!r}` is one entry; pass a list of them, `[{self.leaf_modules!r}]`."
            raise TypeError(msg)
        for each in self.leaf_modules:
            if not isinstance(each, str) and not (isinstance(each, type) and issubclass(each, nn.Module)):
                msg = f"`leaf_modules` lists classes of modules, their names, or paths of modules; got {each!r}."
                raise TypeError(msg)

    def _check_placement(self) -> None:
        is_static = self.placement_policy == "static"
        for name in ("offload_param_frac", "offload_optim_frac"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                msg = f"`{name}={value}` must be between 0 (nothing) and 1 (all)."
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
