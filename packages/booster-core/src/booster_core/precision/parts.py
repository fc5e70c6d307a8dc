"""Autocast in calls of the user's model, or of a part of it, that don't come through the boosted model.

Scripts call a backbone for its hidden states, or ``generate`` of the user's own model. Where the parameters are in
fp32, such a call would compute in fp32, while strategies that keep narrow parameters compute as in training.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn


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
