"""Choose the modules that become FSDP units: by class, by size, by a function, or the model's layers.

A unit's parameters are gathered together, right before its forward. No process group is needed here.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from torch import nn

from booster_core.errors import ConfigError
from booster_runtime.sharding import CONTAINERS, LAYER_NUMEL, layers_of, modules_by_size, without_split_ties

if TYPE_CHECKING:
    from collections.abc import Sequence

    from booster_fsdp.config import FSDPConfig


def choose_units(model: nn.Module, config: FSDPConfig) -> list[str]:
    """Return the names of the modules that become units, in the order of registration, without the model itself.

    Args:
        model: The user's model.
        config: The options that choose units.

    Raises:
        ConfigError: If a class in the options is not in the model, or can't be a unit.

    Collective: none; every rank chooses the same.
    """
    if config.unit_min_numel is not None:
        chosen = modules_by_size(model, config.unit_min_numel, bool)
    elif config.unit_classes or config.unit_if is not None:
        chosen = _asked_for(model, config)
    else:
        chosen = _layers_and_ends(model)
    kept = without_split_ties(model, {id(module) for module in chosen.values()})
    return [name for name, module in chosen.items() if id(module) in kept]


def find_ignored(model: nn.Module, config: FSDPConfig) -> set[nn.Parameter]:
    """Return the parameters that the options keep replicated.

    Raises:
        ConfigError: If a name matches no module or parameter.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    ignored: set[nn.Parameter] = set()
    for name in config.ignored_modules:
        found = [modules[name]] if name in modules else [m for m in modules.values() if _class_name(m) == name]
        if not found:
            msg = f"`ignored_modules` names '{name}', which is neither a module of the model nor the class of one."
            raise ConfigError(msg)
        for module in found:
            ignored.update(module.parameters())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in config.ignored_parameters:
        if name not in parameters:
            msg = f"`ignored_parameters` names '{name}', which is not a parameter of the model."
            raise ConfigError(msg)
        ignored.add(parameters[name])
    return ignored


def head_of(model: nn.Module, chosen: Sequence[str]) -> str | None:
    """Return the name of the unit that is the output head of a transformers model."""
    heads = _named_by(model, "get_output_embeddings")
    return next((name for name, module in model.named_modules() if name in chosen and id(module) in heads), None)


def _layers_and_ends(model: nn.Module) -> dict[str, nn.Module]:
    """Return the model's layers, and the large embeddings and heads that transformers models name."""
    layers = layers_of(model)
    inside = {id(module) for layer in layers.values() for module in layer.modules()}
    ends = _named_by(model, "get_input_embeddings") | _named_by(model, "get_output_embeddings")

    def is_unit(name: str, module: nn.Module) -> bool:
        is_end = bool(name) and id(module) in ends - inside
        return name in layers or (is_end and sum(p.numel() for p in module.parameters()) >= LAYER_NUMEL)

    return {name: module for name, module in model.named_modules() if is_unit(name, module)}


def _named_by(model: nn.Module, accessor: str) -> set[int]:
    """Return the ids of the modules that a method of the models of transformers inside of a model returns."""
    found = set()
    for module in model.modules():
        if hasattr(module, "_no_split_modules"):
            with contextlib.suppress(AttributeError, NotImplementedError):  # some models have no such module
                end = getattr(module, accessor)()
                found |= {id(end)} if isinstance(end, nn.Module) else set()
    return found


def _asked_for(model: nn.Module, config: FSDPConfig) -> dict[str, nn.Module]:
    present, classes, is_unit = _class_names(model), config.unit_classes, config.unit_if
    for name in classes:
        if name not in present:
            msg = (
                f"`unit_classes` names '{name}', but the model has no module of that class. "
                f"It has: {', '.join(map(repr, present))}."
            )
            raise ConfigError(msg)
    chosen = {}
    for name, module in model.named_modules():
        if not name or not (_class_name(module) in classes if is_unit is None else is_unit(name, module)):
            continue
        if isinstance(module, CONTAINERS):
            msg = (
                f"`{'unit_if' if is_unit else 'unit_classes'}` chooses '{name}', a {_class_name(module)}, which has no "
                "forward and so can't be a unit. Choose the modules inside it."
            )
            raise ConfigError(msg)
        chosen[name] = module
    return chosen


def _class_name(module: nn.Module) -> str:
    return type(module).__name__


def _class_names(model: nn.Module) -> list[str]:
    return sorted({_class_name(module) for name, module in model.named_modules() if name})
