"""The shapes of what operations return: torch's meta kernels tell them, and layers that are alike ask many times.

A plan of a pipeline passes millions of operations, so that arguments are walked through by hand here: they are tensors,
numbers and lists of these, and torch's general trees take several times as long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch._meta_registrations
from torch import Tensor
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors of an operation's arguments or results, those in lists included."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found


def replace_tensors(value: Any, replace: Callable[[Tensor], Any]) -> Any:
    """Return a result with something else in the place of each of its tensors."""
    if isinstance(value, Tensor):
        return replace(value)
    if isinstance(value, (list, tuple)):
        made = [replace_tensors(each, replace) for each in value]
        return made if isinstance(value, list) else tuple(made)
    return value


class Shapes:
    """Tells what operations return, as tensors of the meta device."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def returned(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation, without values.

        Raises:
            ConfigError: If torch has no meta kernel for it, or its shape depends on values.
        """
        first: dict[int, int] = {}
        key = (func, _key_of(args, first), _key_of(tuple(kwargs.items()), first) if kwargs else ())
        try:
            found = self._known.get(key)
        except TypeError:  # an argument that has no hash
            return _returned(func, args, kwargs)
        if found is None:
            found = self._known[key] = _returned(func, args, kwargs)
        return found


def unplanned(func: Any, reason: str) -> ConfigError:
    """Return the error of an operation whose result can't be planned."""
    return ConfigError(
        f"The shape of what `{func}` returns can't be known without computing it ({reason}), so that this model can't "
        "be planned. Plan with a variant of it that has no such operation."
    )


def _key_of(values: Iterable[Any], first: dict[int, int]) -> tuple[Any, ...]:
    """Return what a result's shape depends on; tensors that are the same one have the same number."""
    key: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            key.append((first.setdefault(id(value), len(first)), value.shape, value.stride(), value.dtype))
        elif isinstance(value, (list, tuple)):
            key.append(_key_of(value, first))
        else:
            key.append((type(value), value))
    return tuple(key)


def _returned(func: Any, args: Any, kwargs: Any) -> Any:
    metas: dict[int, Tensor] = {}

    def meta_of(tensor: Tensor) -> Tensor:
        if id(tensor) not in metas:
            metas[id(tensor)] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return metas[id(tensor)]

    meta_args, meta_kwargs = pytree.tree_map_only(Tensor, meta_of, (args, kwargs))
    meta_kwargs = {key: None if isinstance(value, torch.Generator) else value for key, value in meta_kwargs.items()}
    if "device" in meta_kwargs or not metas:
        meta_kwargs["device"] = torch.device("meta")
    try:
        return func(*meta_args, **meta_kwargs)
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), "")
        raise unplanned(func, f"{type(error).__name__}: {first_line}") from error
