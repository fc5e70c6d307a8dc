"""Tensors in the containers that batches and outputs come in: those that torch's pytree opens, and dataclasses.

A class that neither opens hides its tensors: they would not be cut, sent or joined, without an error.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


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
