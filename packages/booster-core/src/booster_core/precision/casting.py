"""Casting a model's outputs to a wider format than autocast computed them in, and autocast in calls of its parts.

Scripts call a backbone for its hidden states, or ``generate`` of the user's own model, and so not through the boosted
one. Where the parameters are in fp32, such a call would compute in fp32, while strategies that keep narrow parameters
compute as in training.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn


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


class _Hook:
    """A hook on a module that neither copies nor pickles of it have; these load without this package."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():  # the boosted model's forward does it
            self._call()

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")  # which takes anything, and does nothing


def autocast_parts(modules: Iterable[nn.Module], device_type: str, dtype: torch.dtype) -> None:
    """Let the outermost call of some modules, which may call each other, run under autocast.

    Args:
        modules: The modules.
        device_type: Where they run.
        dtype: In what products are computed.
    """
    # One for each call that has begun: what a model does to autocast in its forward is for its parts as well.
    calls: list[Any] = []

    def enter() -> None:
        context = None if calls or torch.is_autocast_enabled(device_type) else torch.autocast(device_type, dtype=dtype)
        calls.append(context)
        if context is not None:
            context.__enter__()  # type: ignore[no-untyped-call]

    def leave() -> None:
        context = calls.pop() if calls else None  # where another hook has raised before `enter`
        if context is not None:
            context.__exit__(None, None, None)

    for module in modules:
        module.register_forward_pre_hook(_Hook(enter))
        module.register_forward_hook(_Hook(leave), always_call=True)
