"""Casting a model's outputs to a wider format than autocast computed them in."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    import torch


def cast_floating(value: Any, dtype: torch.dtype | None) -> Any:
    """Return ``value`` with every floating tensor inside it cast to ``dtype``.

    Looks into tuples, named tuples, lists, mappings and dataclasses (transformers' ``ModelOutput`` is both); other
    objects, such as key/value caches, are returned as they are. Containers keep their type, and a value in which
    nothing changes is returned itself.

    Args:
        value: A model's output or input.
        dtype: Floating dtype to cast to; ``None`` returns ``value`` itself.
    """
    if dtype is None or all(tensor.dtype == dtype for tensor in _floating_tensors(value)):
        return value
    if isinstance(value, Tensor):
        return value.to(dtype)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_floating(item, dtype) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(cast_floating(item, dtype) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: cast_floating(getattr(value, name), dtype) for name in names})
    changed: MutableMapping[Any, Any] = copy.copy(value)
    for key, item in value.items():
        changed[key] = cast_floating(item, dtype)
    return changed


def _floating_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the floating tensors that `cast_floating` would look at."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _floating_tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if field.init:
                yield from _floating_tensors(getattr(value, field.name))
    elif isinstance(value, MutableMapping):
        for item in value.values():
            yield from _floating_tensors(item)
