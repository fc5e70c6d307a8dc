"""Batches as data loaders yield them: calling a model with one, moving it to a device, counting its samples.

Tensors are found in the containers that torch's pytree opens, and in dataclasses. A class that neither opens hides its
tensors: they would not be cut, sent or joined, without an error.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError
from booster_core.state import compiled_module, without_adapters

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from booster_core import Booster


def fields_of(value: Any) -> dict[str, Any] | None:
    """Return the fields of a dataclass's instance by name; ``None`` for anything else."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)}


def with_fields(value: Any, fields: Mapping[str, Any]) -> Any:
    """Return a copy of a dataclass's instance with other fields; it may be frozen."""
    copied = copy.copy(value)
    for name, each in fields.items():
        object.__setattr__(copied, name, each)
    return copied


def leaves_by_path(value: Any) -> tuple[list[tuple[str, Any]], pytree.TreeSpec]:
    """Return what torch's pytree finds in nested containers, each with its path, and what to put it together with."""
    try:
        leaves, form = pytree.tree_flatten_with_path(value)
    except ValueError:  # a class that is registered without names for its parts, as diffusers' outputs are
        flat, form = pytree.tree_flatten(value)
        return [(f"[{place}]", leaf) for place, leaf in enumerate(flat)], form
    return [(pytree.keystr(path), leaf) for path, leaf in leaves], form


def tensors_of(value: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors in a nest of containers and dataclasses, each with its path.

    An object of another class is opened where it is all there is.
    """
    found = []
    for where, leaf in leaves_by_path(value)[0]:
        fields = fields_of(leaf)
        if fields is None and leaf is value:
            fields = getattr(leaf, "__dict__", None)
        if isinstance(leaf, torch.Tensor):
            found.append((where, leaf))
        elif fields is not None:
            found += [
                (f"{where}.{name}{below}", each) for name, inner in fields.items() for below, each in tensors_of(inner)
            ]
    return found


def hidden_tensors(value: Any) -> list[Tensor]:
    """Return those tensors of `tensors_of` that torch does not see, as its pytree does not open what they are in."""
    seen = {id(leaf) for leaf in pytree.tree_leaves(value)}
    return [tensor for _, tensor in tensors_of(value) if id(tensor) not in seen]


def hides_tensors(leaf: Any) -> bool:
    """Return whether something that pytree takes for a leaf holds tensors."""
    if isinstance(leaf, torch.Tensor):
        return False
    fields = fields_of(leaf) or getattr(leaf, "__dict__", {})
    return any(isinstance(each, torch.Tensor) for each in pytree.tree_leaves(dict(fields)))


_KNOWN: weakref.WeakKeyDictionary[Any, dict[bool, tuple[inspect.Parameter, ...]]] = weakref.WeakKeyDictionary()
"""Parameters of functions; reading a signature takes about 0.1 ms, and training loops ask for it with each batch."""
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def call_with(function: Callable[..., Any], batch: Any) -> Any:
    """Call a model with a batch.

    Args:
        function: The model, or its forward.
        batch: A mapping becomes keyword arguments, a list or tuple positional ones; anything else is the one argument.

    Collective: as the function.
    """
    if isinstance(batch, Mapping):
        return function(**batch)
    if _is_sequence(batch):
        return function(*batch)
    return function(batch)


def taken_by(model: nn.Module, batch: Any) -> Any:
    """Return a batch without the entries that a model's forward does not take: those are for the criterion alone.

    Args:
        model: The user's model.
        batch: Of a mapping, entries whose names are not among the arguments are left out. Of a list or tuple, such as
            ``inputs, targets``, those beyond the arguments are.
    """
    if not isinstance(batch, Mapping) and not _is_sequence(batch):
        return batch
    parameters = parameters_of(named_forward(without_adapters(model)))
    kinds = {each.kind for each in parameters}
    if isinstance(batch, Mapping):
        if inspect.Parameter.VAR_KEYWORD in kinds:
            return batch
        names = {each.name for each in parameters}
        return {name: value for name, value in batch.items() if name in names}
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return batch
    return batch[: sum(each.kind in _POSITIONAL for each in parameters)]


def check_targets(model: nn.Module, batch: Any) -> None:
    """Raise if it can't be told which entries of a batch are the model's arguments and which the criterion's targets.

    Args:
        model: The user's model.
        batch: A list or tuple with more entries than the model's forward requires; entries of mappings have names.

    Raises:
        ConfigError: If further entries may be optional arguments.
    """
    if not _is_sequence(batch):
        return
    parameters = parameters_of(named_forward(without_adapters(model)))
    positional = [each for each in parameters if each.kind in _POSITIONAL]
    optional = [f"`{each.name}`" for each in positional if each.default is not each.empty]
    num_required = len(positional) - len(optional)
    if len(batch) > num_required and optional:
        msg = (
            f"The batch has {len(batch)} entries, of which the forward of {type(model).__name__} requires "
            f"{num_required}: the others may be for {', '.join(optional)} or for the criterion. Let the data loader "
            "yield mappings, whose entries have names."
        )
        raise ConfigError(msg)


def num_samples(batch: Any) -> int:
    """Return how many samples a batch has: the first dimension of its tensors.

    Args:
        batch: Tensors in any nest of dicts, lists and tuples. Tensors without dimensions, and whatever is no tensor,
            belong to all samples; so do tensors whose first dimension is 1.

    Raises:
        ConfigError: If it has no tensors, or they are of different lengths.
    """
    shapes = {
        path: tuple(leaf.shape)
        for path, leaf in leaves_by_path(batch)[0]
        if isinstance(leaf, torch.Tensor) and leaf.dim()
    }
    lengths = {shape[0] for shape in shapes.values()}
    if len(lengths) > 1:
        lengths.discard(1)
    if len(lengths) != 1:
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or f"`{type(batch).__name__}`"
        msg = (
            f"The batch can't be split into microbatches: its tensors must have one entry per sample in their first "
            f"dimension, all of them the same number; got {found}. What is for all samples, such as class weights, "
            "belongs into the criterion, or needs a first dimension of 1; what has rows of its own for each sample, "
            "such as the patches of images, is split by `HybridParallelPlugin(split_batch=...)`."
        )
        raise ConfigError(msg)
    return lengths.pop()


def to_device(booster: Booster, batch: Any) -> Any:
    """Return a batch on the run's device; see `move_batch` for what of it moves.

    Copies of tensors from pinned memory don't block.
    """
    return move_batch(batch, booster.device)


def move_batch(batch: Any, device: torch.device) -> Any:
    """Return a batch on a device: its tensors, in any nest of containers and dataclasses, and what moves itself.

    That is an object with a method ``to``, such as a ``PackedSequence``, a tokenizer's ``BatchEncoding``, or a batch of
    graphs. All else stays as it is. Copies of tensors from pinned memory don't block.
    """

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=True)
        if _moves_itself(leaf):
            return leaf.to(device)
        fields = fields_of(leaf)
        return leaf if fields is None else with_fields(leaf, {name: moved_nest(each) for name, each in fields.items()})

    def moved_nest(nest: Any) -> Any:
        return pytree.tree_map(moved, nest, is_leaf=_moves_itself)

    return moved_nest(batch)


def _is_sequence(batch: Any) -> bool:
    """Return whether a batch is a list or tuple of entries; a ``PackedSequence`` is a tuple, and one object."""
    return isinstance(batch, (list, tuple)) and not _moves_itself(batch)


def _moves_itself(value: Any) -> bool:
    return callable(getattr(value, "to", None)) and not isinstance(value, (torch.Tensor, type))


def parameters_of(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """Return a function's parameters, of a bound method without the first; remembered while the function exists."""
    own = getattr(function, "__func__", function)
    try:
        known = _KNOWN.setdefault(own, {})
    except TypeError:  # callables that can't be referred to weakly, or have no hash
        known = {}
    is_bound = own is not function
    if is_bound not in known:
        known[is_bound] = tuple(inspect.signature(function).parameters.values())
    return known[is_bound]


def named_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the forward whose arguments have names: a module's, or its class's where something general replaced it.

    Activation checkpointing and the compiler do so.
    """
    module = compiled_module(module) or module
    kinds = {each.kind for each in parameters_of(module.forward)}
    if kinds <= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        return functools.partial(type(module).forward, module)
    return module.forward
