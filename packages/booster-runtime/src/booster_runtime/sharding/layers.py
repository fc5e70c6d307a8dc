"""The layers of a model, whose parameters are gathered together; modules that share parameters are in one unit.

No process group is needed here.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules without a forward, which can't be units."""
LAYER_NUMEL = 1 << 16
"""A smaller layer is part of the unit around it: a separate gather costs more than it saves."""


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the model's layers: as transformers lists them, or the larger members of its containers.

    Collective: none; every rank finds the same.
    """
    listed = {name for module in model.modules() for name in _names_in(getattr(module, "_no_split_modules", None))}
    chosen = {name: module for name, module in model.named_modules() if name and type(module).__name__ in listed}
    chosen = {name: module for name, module in chosen.items() if any(True for _ in module.parameters())}
    if chosen:
        return chosen
    members = {
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
        for key, _ in module.named_children()
    }
    return modules_by_size(model, LAYER_NUMEL, lambda name: name in members)


def modules_by_size(model: nn.Module, min_numel: int, is_candidate: Callable[[str], bool]) -> dict[str, nn.Module]:
    """Return the modules with so many parameters of their own, not counting modules inside that are returned, too.

    Args:
        model: The user's model.
        min_numel: Smallest number of elements.
        is_candidate: Returns by a module's name whether it may be returned.

    Collective: none; every rank finds the same.
    """
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
        if numel >= min_numel and not isinstance(module, CONTAINERS) and is_candidate(name):
            chosen.add(name)
            return 0
        return numel

    def _count(module: nn.Module) -> int:
        new = {p for p in module.parameters() if p not in counted}
        counted.update(new)
        return sum(parameter.numel() for parameter in new)

    visit("", model)
    return {name: module for name, module in model.named_modules() if name in chosen}


def without_split_ties(model: nn.Module, units: set[int]) -> set[int]:
    """Drop units until all occurrences of each parameter are in one unit; return the others.

    Args:
        model: The user's model.
        units: The ``id`` of each unit.
    """
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


def parameters_by_unit(model: nn.Module, units: Sequence[str]) -> dict[str, list[nn.Parameter]]:
    """Return, for each unit and for ``""`` (the model itself), the parameters that it gathers."""
    names = {id(module): name for name, module in model.named_modules() if name in set(units)}
    seen: set[nn.Parameter] = set()
    found: dict[str, list[nn.Parameter]] = {name: [] for name in (*units, "")}
    for chain, parameter in _occurrences(model, set(names)):
        if parameter not in seen:
            seen.add(parameter)
            found[names[chain[-1]] if chain else ""].append(parameter)
    return found


def parametrized_in_forward(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose parameters peft parametrizes while forward runs (its ``target_parameters``).

    torch sets such a parameter to its own memory, which counts as a write, and moves it to ``parametrizations`` until
    the forward ends.
    """
    if "peft" not in sys.modules:
        return []
    from peft.tuners.lora.layer import ParamWrapper

    return [module.get_base_layer() for module in model.modules() if isinstance(module, ParamWrapper)]


def _names_in(listed: object) -> set[str]:
    return {str(name) for name in listed} if isinstance(listed, (list, tuple, set, frozenset)) else set()


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


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
