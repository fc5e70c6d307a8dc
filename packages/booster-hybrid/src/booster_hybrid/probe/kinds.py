"""Which modules of a model are of one kind, so that one of them stands for all in the probe.

Two are where they have the same classes, forwards, shapes and plain attributes, down to all that is inside, and the
same rules. What counts the layers of a list is no difference: a number that is the layer's place in it.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from torch import nn

_DEPTH = 3
_OF_MODULES = frozenset(("_parameters", "_buffers", "_modules", "training"))


def kind_of(module: nn.Module, place: int | None, rules: Mapping[str, object]) -> Hashable:
    """Return what tells modules apart.

    Args:
        module: The module.
        place: Its index in a list of layers; ``None`` where it is in none.
        rules: What is changed inside, by name within the module.
    """
    found: list[Hashable] = [tuple(sorted((name, repr(rule)) for name, rule in rules.items()))]
    for name, each in module.named_modules():
        tensors = tuple(
            (key, tuple(tensor.shape), tensor.dtype)
            for key, tensor in (*each.named_parameters(recurse=False), *each.named_buffers(recurse=False))
        )
        attributes = tuple(
            (key, described(value, place)) for key, value in sorted(vars(each).items()) if key not in _OF_MODULES
        )
        found.append((name, type(each), getattr(type(each).forward, "__code__", None), tensors, attributes))
    return tuple(found)


def described(value: Any, place: int | None = None, depth: int = _DEPTH) -> Hashable:
    """Return what tells two values of attributes apart.

    Args:
        value: The value.
        place: A number that stands for the place of what has the attribute; it is a number like others deeper inside.
        depth: How many objects inside of each other are looked into.
    """
    told: Hashable = None
    if type(value) is int and value == place:
        told = "place"
    elif value is None or isinstance(value, (bool, int, float, str, complex, torch.dtype, torch.device, type)):
        told = value
    elif isinstance(value, torch.Tensor):
        told = tuple(value.shape), value.dtype
    elif isinstance(value, (types.MethodType, types.FunctionType)):
        told = getattr(value, "__code__", None)
    elif depth > 0 and not isinstance(value, torch.nn.Module):
        inside = value if isinstance(value, (list, tuple, dict)) else getattr(value, "__dict__", {})
        pairs = inside.items() if isinstance(inside, dict) else enumerate(inside)
        told = tuple((str(key), described(each, depth=depth - 1)) for key, each in pairs)
    return type(value), told
