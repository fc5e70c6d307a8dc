"""Choose the modules that become FSDP units: by class, by size, by a function, or the model's layers.

A unit's parameters are gathered together, right before its forward. Modules that share parameters are wrapped together,
in the unit around them. No process group is needed here.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from torch import nn

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from booster_fsdp.config import FSDPConfig

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules without a forward, which can't be units."""
_LAYER_NUMEL = 1 << 16
"""A smaller layer is part of the unit around it: a separate gather costs more than it saves."""


def choose_units(model: nn.Module, config: FSDPConfig) -> list[str]:
    """Return the names of the modules that become units, in the order of registration, without the model itself.

    Args:
        model: The user's model.
        config: The options that choose units.

    Raises:
        ConfigError: If a class in the options is not in the model, or can't be a unit.

    Collective: none; every rank chooses the same.
    """
    if config.unit_classes:
        chosen = _by_class(model, config.unit_classes)
    elif config.unit_min_numel is not None:
        chosen = _by_size(model, config.unit_min_numel, bool)
    elif config.unit_if is not None:
        chosen = _by_function(model, config.unit_if)
    else:
        chosen = _layers(model)
    kept = _without_split_ties(model, {id(module) for module in chosen.values()})
    return [name for name, module in chosen.items() if id(module) in kept]


def find_ignored(model: nn.Module, config: FSDPConfig) -> set[nn.Parameter]:
    """Return the parameters that the options keep replicated.

    Raises:
        ConfigError: If a name matches no module or parameter.

    Collective: none.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    ignored: set[nn.Parameter] = set()
    for name in config.ignored_modules:
        found = [modules[name]] if name in modules else [m for m in modules.values() if _class_name(m) == name]
        if not found:
            msg = f"`ignored_modules` names '{name}', which is neither a module of the model nor the class of one."
            raise ConfigError(msg + _suggestion(name, [*modules, *_class_names(model)]))
        for module in found:
            ignored.update(module.parameters())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in config.ignored_parameters:
        if name not in parameters:
            msg = f"`ignored_parameters` names '{name}', which is not a parameter of the model."
            raise ConfigError(msg + _suggestion(name, list(parameters)))
        ignored.add(parameters[name])
    return ignored


def parameters_by_unit(model: nn.Module, units: Sequence[str]) -> dict[str, list[nn.Parameter]]:
    """Return, for each unit and for ``""`` (the model itself), the parameters that it gathers.

    Collective: none.
    """
    names = {id(module): name for name, module in model.named_modules() if name in set(units)}
    seen: set[nn.Parameter] = set()
    found: dict[str, list[nn.Parameter]] = {name: [] for name in (*units, "")}
    for chain, parameter in _occurrences(model, set(names)):
        if parameter not in seen:
            seen.add(parameter)
            found[names[chain[-1]] if chain else ""].append(parameter)
    return found


def _by_class(model: nn.Module, classes: Sequence[str]) -> dict[str, nn.Module]:
    present = _class_names(model)
    for name in classes:
        if name not in present:
            msg = (
                f"`unit_classes` names '{name}', but the model has no module of that class. "
                f"It has: {', '.join(map(repr, present))}."
            )
            raise ConfigError(msg + _suggestion(name, present))
    chosen = {name: module for name, module in model.named_modules() if name and _class_name(module) in classes}
    for name, module in chosen.items():
        _check_has_forward(name, module, "`unit_classes`")
    return chosen


def _by_function(model: nn.Module, choose: Callable[[str, nn.Module], bool]) -> dict[str, nn.Module]:
    chosen = {name: module for name, module in model.named_modules() if name and choose(name, module)}
    for name, module in chosen.items():
        _check_has_forward(name, module, "`unit_if`")
    return chosen


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the model's layers: as transformers lists them, or the members of its containers."""
    listed = {name for module in model.modules() for name in _names_in(getattr(module, "_no_split_modules", None))}
    chosen = {name: module for name, module in model.named_modules() if name and _class_name(module) in listed}
    chosen = {name: module for name, module in chosen.items() if any(True for _ in module.parameters())}
    if chosen:
        return chosen
    members = {
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
        for key, _ in module.named_children()
    }
    return _by_size(model, _LAYER_NUMEL, lambda name: name in members)


def _names_in(listed: object) -> set[str]:
    return {str(name) for name in listed} if isinstance(listed, (list, tuple, set, frozenset)) else set()


def _by_size(model: nn.Module, min_numel: int, is_candidate: Callable[[str], bool]) -> dict[str, nn.Module]:
    chosen: set[str] = set()
    counted: set[nn.Parameter] = set()

    def visit(name: str, module: nn.Module) -> int:
        """Return the number of elements below a module that are not in a unit yet."""
        own = [p for p in module.parameters(recurse=False) if p not in counted]
        counted.update(own)
        numel = sum(parameter.numel() for parameter in own)
        for key, child in module.named_children():
            # MultiheadAttention uses the weights of its projections without calling them.
            inside = _count(child) if isinstance(module, nn.MultiheadAttention) else visit(_join(name, key), child)
            numel += inside
        if numel >= min_numel and not isinstance(module, _CONTAINERS) and is_candidate(name):
            chosen.add(name)
            return 0
        return numel

    def _count(module: nn.Module) -> int:
        new = {p for p in module.parameters() if p not in counted}
        counted.update(new)
        return sum(parameter.numel() for parameter in new)

    visit("", model)
    return {name: module for name, module in model.named_modules() if name in chosen}


def _without_split_ties(model: nn.Module, units: set[int]) -> set[int]:
    """Drop units until all occurrences of each parameter are in one unit; return the others."""
    while True:
        chains: dict[nn.Parameter, list[tuple[int, ...]]] = {}
        for chain, parameter in _occurrences(model, units):
            chains.setdefault(parameter, []).append(chain)
        split: set[int] = set()
        for found in chains.values():
            if len({chain[-1:] for chain in found}) > 1:
                depth = _common_prefix(found)
                split.update(unit for chain in found for unit in chain[depth:])
        if not split:
            return units
        units = units - split


def _occurrences(model: nn.Module, units: set[int]) -> Iterator[tuple[tuple[int, ...], nn.Parameter]]:
    """Yield each registration of a parameter, with the units around it from the outermost to the innermost."""
    seen: set[tuple[int, tuple[int, ...]]] = set()

    def visit(module: nn.Module, chain: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], nn.Parameter]]:
        if id(module) in units:
            chain = (*chain, id(module))
        if (id(module), chain) in seen:
            return
        seen.add((id(module), chain))
        for parameter in module.parameters(recurse=False):
            yield chain, parameter
        for child in module.children():
            yield from visit(child, chain)

    yield from visit(model, ())


def _common_prefix(chains: Sequence[tuple[int, ...]]) -> int:
    depth = 0
    while all(len(chain) > depth and chain[depth] == chains[0][depth] for chain in chains):
        depth += 1
    return depth


def _check_has_forward(name: str, module: nn.Module, option: str) -> None:
    if isinstance(module, _CONTAINERS):
        msg = (
            f"{option} chooses '{name}', a {_class_name(module)}, which has no forward and so can't be a unit. "
            "Choose the modules inside it."
        )
        raise ConfigError(msg)


def _class_name(module: nn.Module) -> str:
    return type(module).__name__


def _class_names(model: nn.Module) -> list[str]:
    return sorted({_class_name(module) for name, module in model.named_modules() if name})


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _suggestion(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean '{close[0]}'?" if close else ""
