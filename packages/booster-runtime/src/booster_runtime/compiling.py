"""`compile_layers`: compile each repeated block of a model, so that plugins work between the blocks.

What a plugin does for a block (gather its parameters, draw its random numbers, send its gradients) happens in hooks,
which the compiler can't follow. So a block's ``forward`` is compiled rather than its call, and hooks stay outside.
"""

from __future__ import annotations

import types
import weakref
from typing import TYPE_CHECKING, Any

import torch

from booster_core.errors import ConfigError
from booster_core.plugin import ModelWrapper
from booster_runtime.activations.selection import select_modules

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from booster_runtime.activations.selection import Choice

__all__ = ["compile_apart", "compile_layers", "has_compiled_forward", "is_compiled"]

_compiled: weakref.WeakKeyDictionary[Any, tuple[Callable[..., Any], dict[str, Any]]] = weakref.WeakKeyDictionary()
"""The functions that `compile_layers` has made, and what they were made of."""


def compile_layers(model: nn.Module, by: Choice = None, **options: Any) -> list[str]:
    """Compile the forward of each repeated block in place, once for all blocks of a class.

    Call it before ``boost``; it works under every plugin. Names of parameters and classes of modules stay as they are.
    Under Gemini and ZeRO-3 the parameters of a block are gathered together, before its forward and in backward. If
    it is recomputed, they are gathered one by one, and its graph breaks at each module.

    Args:
        model: The model, not boosted yet.
        by: Which modules, as for `enable_activation_checkpointing`; by default the model's repeated blocks.
        options: For ``torch.compile``, such as ``mode`` or ``dynamic``.

    Returns:
        The names of the modules that are compiled now; the work is done in their first forward.

    Raises:
        TypeError: If ``model`` or ``by`` is of another type.
        ConfigError: If the model is boosted already, no module is meant, or one is compiled already.

    Collective: none, but every rank must do the same.
    """
    if isinstance(model, ModelWrapper):
        msg = "`compile_layers` needs the model before it is boosted. Call it, then `booster.boost(model, ...)`."
        raise ConfigError(msg)
    chosen = select_modules(model, by, 1, "compile_layers")
    again = next((name for module, name in chosen.items() if any(map(is_compiled, module.modules()))), None)
    if again is not None:
        msg = f"'{again}' or a part of it is compiled already. Compile each block once."
        raise ConfigError(msg)
    compiled: dict[Callable[..., Any], Any] = {}
    for module in chosen:
        own: Any = vars(module).get("forward")
        function: Any = type(module).forward if own is None else getattr(own, "__func__", own)
        if function not in compiled:
            compiled[function] = _compile(function, options)
        # A bound method, unlike a function that remembers the module, is bound to the copy when a module is copied.
        module.forward = compiled[function] if function is own else types.MethodType(compiled[function], module)
    return list(chosen.values())


def compile_apart(model: nn.Module) -> None:
    """Give each block that `compile_layers` has compiled code of its own, where a strategy has made them different.

    The compiler counts how often it compiles one code, and leaves it after eight times.
    """
    for module in model.modules():
        if not has_compiled_forward(module):
            continue
        forward = vars(module)["forward"]
        function, options = _compiled[getattr(forward, "__func__", forward)]
        if not isinstance(function, types.FunctionType):
            continue
        own = types.FunctionType(
            function.__code__.replace(), function.__globals__, None, function.__defaults__, function.__closure__
        )
        own.__kwdefaults__ = function.__kwdefaults__
        made = _compile(own, options)
        module.forward = types.MethodType(made, module) if isinstance(forward, types.MethodType) else made


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module's forward, its call, or a wrapper around it is compiled."""
    return (
        has_compiled_forward(module)
        or getattr(module, "_compiled_call_impl", None) is not None
        or type(module).__name__ == "OptimizedModule"
    )


def _compile(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    made = torch.compile(function, **options)
    _compiled[made] = function, options
    return made


def has_compiled_forward(module: nn.Module) -> bool:
    """Return whether a module's forward is compiled apart from its hooks, as `compile_layers` does."""
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "__func__", forward) in _compiled
