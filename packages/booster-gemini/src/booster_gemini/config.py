"""`GeminiConfig`: the options of Gemini, checked without a process group, and the modules that it lists as leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from booster_core.errors import ConfigError
from booster_zero.engine import ShardingOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class GeminiConfig(ShardingOptions):
    """Options of Gemini; `ShardingOptions` documents those that are not here.

    Args:
        placement_policy: ``"static"`` offloads fixed fractions; ``"auto"`` stays within ``memory_budget_bytes`` and
            evicts the chunk whose next use is furthest away.
        offload_param_frac: Fraction of the parameters that is offloaded while not in use, for ``"static"``.
        offload_optim_frac: Fraction of the optimizer state that is offloaded, for ``"static"``. With an accelerator,
            the host steps on it.
        memory_budget_bytes: Device memory (on CPU runs, host memory) that each rank may use for parameters, gradients
            and optimizer state, for ``"auto"``; activations are not included.
        offload_dir: Folder on a disk for offloaded chunks. On CPU runs, disk is the only offload target; with an
            accelerator, ``None`` offloads to host memory.
        pin_memory: Pin host memory, with an accelerator.
        shard_param_frac: Fraction of the parameters that is resharded after each use; the rest stays gathered until
            the next step, which takes more memory and fewer gathers. 0 is what ZeRO-2 does.
        min_chunk_bytes: Size in bytes at which a chunk takes no further parameter; a larger one has a chunk of its own.
            Where the largest layer has up to four times as many, chunks hold one. If ``memory_budget_bytes`` does not
            hold the state of three such chunks, they are smaller.
        max_prefetch: Number of chunks to prefetch, at most a quarter of ``memory_budget_bytes``; 0 disables
            prefetching.
        leaf_modules: Modules whose parameters are gathered as one, because the data chooses which are used, such as a
            mixture of experts: classes, their names, or paths. A list of modules counts as a part of the module that
            runs it. Takes memory for all parameters of such a module at once.

    Raises:
        ConfigError: If a value is out of range.
        TypeError: If ``leaf_modules`` is no list of classes and names.
    """

    placement_policy: str = "static"
    offload_param_frac: float = 0.0
    offload_optim_frac: float = 0.0
    memory_budget_bytes: int | None = None
    offload_dir: str | Path | None = None
    pin_memory: bool = True
    shard_param_frac: float = 1.0
    min_chunk_bytes: int = 16 * 2**20
    max_prefetch: int = 1
    leaf_modules: Sequence[str | type[nn.Module]] = ()

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
        self._check_known("placement_policy", ("static", "auto"))
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
        self._check_positive("memory_budget_bytes", "a number of bytes")
        if self.memory_budget_bytes is not None and is_static:
            msg = (
                f"`memory_budget_bytes={self.memory_budget_bytes}` is for placement_policy='auto'; 'static' takes "
                "`offload_param_frac` and `offload_optim_frac` instead."
            )
            raise ConfigError(msg)
        if self.memory_budget_bytes is None and not is_static:
            msg = (
                "`placement_policy='auto'` needs `memory_budget_bytes`: what a device has less what activations take, "
                "which `booster plan` predicts."
            )
            raise ConfigError(msg)
        if self.offload_dir is not None and is_static and not (self.offload_param_frac or self.offload_optim_frac):
            msg = (
                f"`offload_dir='{self.offload_dir}'` would stay empty. Pass `offload_param_frac`, "
                "`offload_optim_frac`, or placement_policy='auto' with `memory_budget_bytes`."
            )
            raise ConfigError(msg)


def find_leaves(model: nn.Module, wanted: Sequence[str | type[nn.Module]]) -> dict[nn.Module, list[nn.Module]]:
    """Return the leaves of a model, each below the module in whose forward it is gathered.

    That is the leaf itself, or for a list of modules, which has no forward, the nearest module above that has one.

    Args:
        model: The user's model.
        wanted: Classes, names of classes, and paths of modules.

    Raises:
        ConfigError: If an entry fits no module, or only lists that are above everything that has a forward.
    """
    modules = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    for each in wanted:
        fitting = {path: module for path, module in modules.items() if _fits(path, module, each)}
        if not fitting:
            classes = ", ".join(sorted({type(module).__name__ for module in modules.values()}))
            msg = (
                f"`leaf_modules` lists {_told(each)}, and the model has no such module. Pass classes, names of classes "
                f"or paths of modules, as `named_modules()` gives them. The model's classes: {classes}."
            )
            raise ConfigError(msg)
        found.update(fitting)
    hosts: dict[nn.Module, list[nn.Module]] = {}
    for path, module in found.items():
        if any(path.startswith(f"{other}.") or (path and not other) for other in found):
            continue  # a part of a larger leaf
        hosts.setdefault(_host(modules, path), []).append(module)
    return hosts


def _fits(path: str, module: nn.Module, wanted: str | type[nn.Module]) -> bool:
    if isinstance(wanted, str):
        return wanted in (path, type(module).__name__)
    return isinstance(module, wanted)


def _host(modules: Mapping[str, nn.Module], path: str) -> nn.Module:
    place = path
    while type(modules[place]).forward is nn.Module.forward:
        if not place:
            msg = f"`leaf_modules` lists '{path}', and neither that nor a module above it has a forward."
            raise ConfigError(msg)
        place = place.rpartition(".")[0]
    return modules[place]


def _told(wanted: str | type[nn.Module]) -> str:
    return repr(wanted) if isinstance(wanted, str) else f"the class `{wanted.__name__}`"
