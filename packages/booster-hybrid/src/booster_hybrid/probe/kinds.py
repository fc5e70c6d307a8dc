"""Which modules of a model are of one kind, so that one of them stands for all in the probe.

Two are where they have the same classes, forwards, shapes and plain attributes, down to all that is inside, and the
same rules. What counts the layers of a list is no difference: a number that is the layer's place in it.
"""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from torch import nn

_DEPTH = 3
_OF_MODULES = frozenset(("_parameters", "_buffers", "_modules", "training"))


def structural_key(module: nn.Module, place: int | None, rules: Mapping[str, object]) -> Hashable:
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
    told: Hashable = id(value)  # what can't be looked into is like itself alone
    if type(value) is int and value == place:
        told = "place"
    elif value is None or isinstance(value, (bool, int, float, str, bytes, complex, torch.dtype, torch.device, type)):
        told = value
    elif isinstance(value, torch.Tensor):
        told = tuple(value.shape), value.dtype
    elif isinstance(value, torch.nn.Module):
        told = None
    elif depth > 0 and (inside := _inside(value)) is not None:
        told = tuple((str(key), described(each, depth=depth - 1)) for key, each in inside)
    return type(value), told


def _inside(value: Any) -> list[tuple[object, Any]] | None:
    """Return what makes up an object, with a name or number for each; ``None`` where that can't be seen."""
    found: Iterable[tuple[object, Any]] | None = None
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        found = enumerate((value.__code__.co_code, value.__code__.co_consts, cells, value.__defaults__))
    elif isinstance(value, types.MethodType):
        found = enumerate((value.__func__, value.__self__))
    elif isinstance(value, functools.partial):
        found = enumerate((value.func, value.args, value.keywords))
    elif isinstance(value, dict):
        found = value.items()
    elif isinstance(value, (list, tuple)):
        found = enumerate(value)
    elif isinstance(value, (set, frozenset)):
        found = enumerate(sorted(value, key=repr))
    elif callable(getattr(value, "tobytes", None)):  # an array of NumPy
        found = enumerate((value.tobytes(), getattr(value, "shape", None)))
    else:
        slots = [name for each in type(value).__mro__ for name in _slots(each) if hasattr(value, name)]
        if slots or hasattr(value, "__dict__"):
            found = [*getattr(value, "__dict__", {}).items(), *((name, getattr(value, name)) for name in slots)]
    return None if found is None else [*found]


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))
