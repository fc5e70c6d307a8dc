"""Guards of a boosted model and optimizer, which raise where a script trains past them, or changes what they know.

The user's optimizer has other parameters than before under some strategies, and knows nothing of loss scales and of
gradients that are not averaged yet. The user's model runs past the strategy's forward and the run's precision. Either
would go wrong in silence, so hooks on them tell calls by the boosted objects from calls by a script. ``zero_grad`` of
the user's optimizer does what that of the boosted one does.

Of parameters that a script gives the model after `boost`, no optimizer and no strategy knows. Torch tells of every
parameter and module that is registered; where a boosted model's module gets one, its next forward looks (`Structure`).
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as torch_module

from booster_core.errors import ConfigError
from booster_core.state.names import compiled_module, own_class, without_adapters

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.optim import Optimizer


class CallGuard:
    """Whether a call of the user's own object comes from the boosted one.

    Attributes:
        is_open: True while the boosted object calls.
        is_boosted: Whether `boost` has returned the object.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.is_boosted = False


class _Forwards:
    """A forward pre-hook on a user's model that lets training forwards through an open guard only."""

    def __init__(self, guard: CallGuard) -> None:
        self.guard = guard

    def __call__(self, module: nn.Module, args: Any) -> None:  # noqa: ARG002 - torch's signature
        # In this order, so that compiled code depends on the guard only where it decides.
        if module.training and torch.is_grad_enabled() and not self.guard.is_open:
            name = own_class(module).__name__
            msg = (
                f"`{name}` was called in training, but not through the model that `boost` returned: its gradients "
                "would not be those of the run. Call the boosted model itself, also in place of methods of the model "
                "that call `self(...)`. To evaluate, call it under `torch.no_grad()` or after `.eval()`."
            )
            raise ConfigError(msg)

    def __reduce__(self) -> Any:
        # A copy of the model is not boosted, and a pickle of it must load without this package: `{}.get(module, args)`
        # returns the arguments as they are.
        return getattr, ({}, "get")


class _Steps:
    """A step pre-hook on a user's optimizer that lets steps through an open guard only."""

    def __init__(self, guard: CallGuard) -> None:
        self.guard = guard

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002 - torch's signature
        if not self.guard.is_open:
            name = type(optimizer).__name__
            msg = (
                f"`{name}.step` was called on the optimizer that was passed to `boost`, which does not see the "
                "gradients of the run. Call `step` of the optimizer that `boost` returned: "
                "`model, optimizer, *_ = booster.boost(model, optimizer)`."
            )
            raise ConfigError(msg)


def guard_forward(model: nn.Module) -> CallGuard:
    """Let a user's model run in training through the boosted model only.

    Evaluation, generation and other forwards without gradients stay possible, as does a frozen model's forward, whose
    guard stays open.

    Args:
        model: The user's model; one that was compiled, or given adapters, is guarded with the model inside of it.

    Returns:
        The guard that the boosted model's forward opens; the same where a `boost` that raised had made one.
    """
    found = _guards(model)
    if found:
        return found[0]
    guard = CallGuard()
    guard.is_open = not any(parameter.requires_grad for parameter in model.parameters())
    for module in _layers_of(model):
        module.register_forward_pre_hook(_Forwards(guard), prepend=True)
    return guard


def mark_boosted(model: nn.Module) -> None:
    """Remember that a user's model is boosted, for as long as it lives; copies of it are not."""
    for guard in _guards(model):
        guard.is_boosted = True


def was_boosted(model: nn.Module) -> bool:
    """Return whether `boost` has been given a user's model before, by any Booster."""
    return any(guard.is_boosted for guard in _guards(model))


def _layers_of(model: nn.Module) -> list[nn.Module]:
    """Return a user's model, and the models inside that were compiled or given adapters."""
    inner = compiled_module(model) or model
    return list({id(each): each for each in (model, inner, without_adapters(inner))}.values())


def _guards(model: nn.Module) -> list[CallGuard]:
    hooks = [hook for module in _layers_of(model) for hook in module._forward_pre_hooks.values()]  # noqa: SLF001 - torch has no public way to ask
    return [hook.guard for hook in hooks if isinstance(hook, _Forwards)]


def guard_step(optimizer: Optimizer) -> CallGuard:
    """Let a user's optimizer step through the boosted optimizer only.

    Schedulers that count its steps work on, and copies of the optimizer are free.

    Returns:
        The guard that the boosted optimizer opens; the same for an optimizer that is boosted twice.
    """
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    if hooks is None:  # an optimizer that never called `Optimizer.__init__` has none
        return CallGuard()
    found = [hook.guard for hook in hooks.values() if isinstance(hook, _Steps)]
    if found:
        return found[0]
    guard = CallGuard()
    optimizer.register_step_pre_hook(_Steps(guard))
    return guard


class _ZeroGrad:
    """``zero_grad`` of a user's optimizer that drops the gradients of the run, wherever the strategy keeps them."""

    def __init__(self, optimizer: Optimizer, boosted: Optimizer) -> None:
        self._optimizer, self._boosted = weakref.ref(optimizer), weakref.ref(boosted)

    def __call__(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        boosted, optimizer = self._boosted(), self._optimizer()
        if boosted is not None:
            boosted.zero_grad(set_to_none)
        elif optimizer is not None:
            zero_grad_inside(optimizer, set_to_none=set_to_none)


def share_zero_grad(optimizer: Optimizer, boosted: Optimizer) -> None:
    """Let ``zero_grad`` of a user's optimizer do what that of the boosted one does. Copies are free."""
    present = vars(optimizer).get("zero_grad")
    if present is None or isinstance(present, _ZeroGrad):  # else a script has replaced it
        optimizer.zero_grad = _ZeroGrad(optimizer, boosted)  # type: ignore[method-assign]


def zero_grad_inside(optimizer: Optimizer, *, set_to_none: bool) -> None:
    """Drop the gradients that an optimizer lists itself."""
    method: Any = optimizer.zero_grad
    if isinstance(method, _ZeroGrad):
        type(optimizer).zero_grad(optimizer, set_to_none)
    else:
        method(set_to_none)


def through_guard(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method of a boosted model run the user's model; the method's object holds the `CallGuard` as ``_guard``.

    Collective: as the method.
    """

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard = self.__dict__["_guard"]
        before = guard.is_open
        guard.is_open = True
        if torch.compiler.is_compiling():
            # Graphs can't break inside of a `try`. An error leaves the guard open, which can hide a later mistake only.
            outputs = method(self, *args, **kwargs)
            guard.is_open = before
            return outputs
        try:
            structure = self.__dict__.get("_structure")
            if structure is not None and torch.is_grad_enabled():
                structure.check()
            return method(self, *args, **kwargs)
        finally:
            guard.is_open = before

    return run


_MARK = "_is_boosted"
_registered = 0


def _count(module: nn.Module, *_: object) -> None:
    # Also traced by the compiler, for containers that a forward makes: those must not touch the number.
    if _MARK in module.__dict__:
        global _registered  # noqa: PLW0603 - torch's hooks are global, too
        _registered += 1


torch_module.register_module_parameter_registration_hook(_count)
torch_module.register_module_module_registration_hook(_count)


class Structure:
    """The parameters that a model had at `boost`.

    Args:
        model: The user's model, as the strategy has laid it out.
        are_replaced: The strategy puts other objects in the place of parameters, of the same names and shapes, in the
            same modules.
    """

    def __init__(self, model: nn.Module, *, are_replaced: bool) -> None:
        self._model, self._are_replaced = model, are_replaced
        for module in model.modules():
            module.__dict__[_MARK] = True
        self._known, self._seen = self._parameters(), _registered

    def check(self) -> None:
        """Check that the model has the same parameters still.

        Raises:
            ConfigError: If it has not.
        """
        if self._seen == _registered:
            return
        before, now = self._known, self._parameters()
        self._seen = _registered
        others = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if others:
            self._seen = -1  # raise in each forward
            was, new = ({name: shape for name, (shape, _) in known.items()} for known in (before, now))
            described = ", ".join(f"'{name}' ({was.get(name)} -> {new.get(name)})" for name in others[:5])
            msg = (
                f"{len(others)} parameter(s) of the model are others than at `boost`: {described}. Neither the "
                "strategy nor the optimizer knows of them. Change the model before `boost`, as by "
                "`resize_token_embeddings`, `tie_weights`, `add_adapter`, `merge_and_unload` or another head; later, "
                "save it, change the loaded one and boost that."
            )
            raise ConfigError(msg)

    def __reduce__(self) -> Any:
        # A copy of the model is not boosted.
        return type(None), ()

    def _parameters(self) -> dict[str, tuple[tuple[int, ...], int]]:
        named = self._model.named_parameters()
        return {name: (tuple(each.shape), self._identity(name, each)) for name, each in named}

    def _identity(self, name: str, parameter: nn.Parameter) -> int:
        if not self._are_replaced:
            return id(parameter)
        return _MARK in self._model.get_submodule(name.rpartition(".")[0]).__dict__
