"""Choose the modules that become FSDP units, by class, size, a function or the model's layers; and their dtypes.

A unit's parameters are gathered together, right before its forward. No process group is needed here.

Parameters are kept in fp32 and gathered in a narrower dtype. Forward then runs under autocast, which chooses a dtype
for each operation, or with ``mixed_precision`` as ``fully_shard`` does by itself: inputs are cast, operations follow.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from booster_core.errors import ConfigError
from booster_core.precision import NARROW, PrecisionPolicy
from booster_runtime.sharding import CONTAINERS, LAYER_NUMEL, layers_of, modules_by_size, without_split_ties

if TYPE_CHECKING:
    from collections.abc import Sequence

    from booster_fsdp.config import FSDPConfig


_NOT_ASKED = PrecisionPolicy(param_dtype=None, follows_model=True)


def resolve_formats(config: FSDPConfig, asked: PrecisionPolicy) -> PrecisionPolicy:
    """Return the precision of a run, from what was asked for by name and the policy of torch in the options.

    Raises:
        ConfigError: If they differ.
    """
    theirs = config.mixed_precision
    if theirs is None:
        return asked
    compute = theirs.param_dtype or torch.float32
    reduced = reduce_dtype(theirs, torch.float32) or torch.float32  # of parameters in fp32
    if compute not in (torch.float32, *NARROW):
        msg = f"`mixed_precision` has `param_dtype={compute}`. Use torch.bfloat16, torch.float16 or torch.float32."
        raise ConfigError(msg)
    if asked == _NOT_ASKED:
        return replace(asked, compute_dtype=compute, reduce_dtype=reduced, output_dtype=theirs.output_dtype)
    for what, ours, other in (
        ("param_dtype", asked.compute_dtype, compute),
        ("reduce_dtype", asked.reduce_dtype, reduced),
        ("output_dtype", asked.output_dtype, theirs.output_dtype or asked.output_dtype),
    ):
        if ours != other:
            msg = (
                f"`mixed_precision` has {what} {other}, and the precision '{asked.name}' asks for {ours} there. Give "
                "formats in one place: leave out the precision, or change the policy."
            )
            raise ConfigError(msg)
    return asked


def uses_autocast(config: FSDPConfig, policy: PrecisionPolicy) -> bool:
    """Return whether forward runs under autocast."""
    return policy.uses_autocast and config.mixed_precision is None


def gathers_narrow(config: FSDPConfig, policy: PrecisionPolicy) -> bool:
    """Return whether parameters are gathered in a narrower dtype than that in which they are kept."""
    is_cast = policy.uses_autocast or config.mixed_precision is not None
    return is_cast and policy.compute_dtype in NARROW


def unit_format(
    config: FSDPConfig, policy: PrecisionPolicy, dtype: torch.dtype | None, *, is_root: bool, is_rounded: bool = True
) -> MixedPrecisionPolicy:
    """Return the dtypes of a unit.

    Args:
        config: Options.
        policy: Precision of the run.
        dtype: The dtype of the unit's trained parameters, or of its frozen ones; ``None`` if it has none.
        is_root: Whether the unit is the model itself.
        is_rounded: Whether a narrow precision gathers it in its dtype; else each parameter is gathered in its own.
    """
    if config.mixed_precision is not None:
        return replace(config.mixed_precision, output_dtype=policy.output_dtype if is_root else None)
    gathered = policy.compute_dtype if policy.uses_autocast and is_rounded else None
    reduced: torch.dtype | None = policy.reduce_dtype
    is_wider = dtype is not None and policy.param_dtype is None and dtype.itemsize > policy.reduce_dtype.itemsize
    if is_wider or (gathered is None and reduced == dtype):
        reduced = None
    # Autocast handles inputs, and the wrapper outputs.
    return MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=reduced, cast_forward_inputs=False)


def reduce_dtype(policy: MixedPrecisionPolicy, dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype in which torch reduces the gradients of a unit.

    Args:
        policy: The unit's dtypes.
        dtype: That of the unit's trained parameters; ``None`` if it has none.
    """
    if policy.reduce_dtype is not None:
        return policy.reduce_dtype
    # Before torch 2.15, which brought that method, the dtype of the gathered parameters came first.
    return dtype if hasattr(FSDPModule, "finalize_backward") else policy.param_dtype or dtype


def describe_formats(
    config: FSDPConfig, policy: PrecisionPolicy, kept: set[torch.dtype], *, has_unrounded: bool = False
) -> str:
    """Return what `Booster.describe` says of the formats of forward, of parameters and of optimizer state."""
    how = "by autocast" if uses_autocast(config, policy) else "without autocast"
    compute = str(policy.compute_dtype).removeprefix("torch.")
    names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in kept))
    if not gathers_narrow(config, policy):
        return f"forward and backward in the dtype of the parameters, kept in {names}"
    gathered = f"{compute}, those in a unit with a frozen base as they are" if has_unrounded else compute
    return f"forward and backward in {compute} {how}; parameters kept in {names} and gathered in {gathered}"


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
