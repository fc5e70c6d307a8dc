"""Find the modules that `GeminiConfig.leaf_modules` lists, whose parameters are gathered as one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


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
