"""Hooks that a script puts on parameters: in backward they see the gradient of this rank's samples, not the average.

What is linear in the gradient, such as a mask, a factor or a constant that is added, may run before the average as well
as after it. So each hook that changes a gradient is tried on other gradients too, whenever it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import DisableTorchFunctionSubclass

from booster_core.errors import GradientError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, MutableMapping

    from torch import Tensor, nn

_REMEDY = (
    "After backward, gradients are averaged: clip by `optimizer.clip_grad_by_value` or `optimizer.clip_grad_by_norm`, "
    "change them otherwise by `booster_runtime.full_gradient` and `set_full_gradient`, and step with the optimizer "
    "that `boost` returned."
)


def watch_gradient_hooks(parameters: Iterable[tuple[str, nn.Parameter]], *, num_own: int = 0) -> None:
    """Let a script's hooks on parameters raise in backward where what they do to a gradient is not linear.

    To be called before each forward: the script may have registered hooks since.

    Args:
        parameters: The trained parameters and their names.
        num_own: How many hooks after accumulation the strategy has on each.
    """
    if dist.get_world_size() > 1:
        for name, parameter in parameters:
            if parameter._backward_hooks:  # noqa: SLF001 - there is no public way to see hooks
                _watch(parameter._backward_hooks, _OnGradient, name)  # noqa: SLF001
            hooks = parameter._post_accumulate_grad_hooks  # noqa: SLF001
            if hooks and len(hooks) > num_own:
                _watch(hooks, _OnParameter, name)


def _watch(hooks: MutableMapping[int, Any], kind: Callable[[Any, str], Any], name: str) -> None:
    for key, hook in hooks.items():
        if not (getattr(hook, "__module__", None) or "").startswith("booster_"):
            hooks[key] = kind(hook, name)


class _OnGradient:
    """A hook of ``register_hook``, which returns another gradient.

    Args:
        hook: The hook.
        name: The parameter's name.
    """

    def __init__(self, hook: Callable[[Tensor], Tensor | None], name: str) -> None:
        self._hook, self._name = hook, name

    def __call__(self, gradient: Tensor) -> Tensor | None:
        result = self._hook(gradient)
        if result is not None and not _is_linear(self._hook, gradient, result):
            raise _refused(self._hook, self._name)
        return result


class _OnParameter:
    """A hook of ``register_post_accumulate_grad_hook``, which may change the gradient in place, or step with it.

    Args:
        hook: The hook.
        name: The parameter's name.
    """

    def __init__(self, hook: Callable[[Tensor], None], name: str) -> None:
        self._hook, self._name = hook, name

    def __call__(self, parameter: Tensor) -> None:
        with DisableTorchFunctionSubclass():
            gradient = parameter.grad
        if type(gradient) is not torch.Tensor:  # another class refuses to be read
            self._hook(parameter)
            return
        before, versions = gradient.detach().clone(), _versions(parameter, gradient)
        self._hook(parameter)
        result = parameter.grad
        if result is gradient and _versions(parameter, gradient) == versions:
            return  # it was only read

        def change(other: Tensor) -> Tensor | None:
            parameter.grad = other.clone()
            self._hook(parameter)
            return parameter.grad

        has_stepped = _versions(parameter) != versions[:1]
        if result is None or has_stepped or not _is_linear(change, before, result):
            raise _refused(self._hook, self._name)
        parameter.grad = result


def _versions(*tensors: Tensor) -> list[int]:
    return [tensor._version for tensor in tensors]  # noqa: SLF001 - there is no public name


def _is_linear(hook: Callable[[Tensor], Tensor | None], gradient: Tensor, result: Tensor) -> bool:
    """Return whether what a hook makes of a gradient scales with that, and of a sum it makes the sum.

    It may add a constant, such as a decay of the parameter, which the average of all ranks has once, too.
    """
    with torch.no_grad():
        added = hook(torch.zeros_like(gradient))
        if added is None:
            return False
        if not added.is_sparse:
            added = added.nan_to_num(0.0, 0.0, 0.0)  # of what divides by the gradient's norm
        if not _is_close(hook(-0.5 * gradient), -0.5 * result + 1.5 * added):
            return False
        if gradient.is_sparse or not gradient.dim():
            return True
        other = gradient.flip(*range(gradient.dim()))
        of_other = hook(other)
        return of_other is not None and _is_close(hook(0.5 * (gradient + other)), 0.5 * (result + of_other))


def _is_close(found: Tensor | None, expected: Tensor) -> bool:
    """Return whether two tensors are equal but for rounding; what is not finite is not compared."""
    if found is None or not expected.numel():
        return found is not None
    found, expected = (each.to_dense() if each.is_sparse else each for each in (found, expected))
    difference = (found - expected).abs().max()
    return not bool(difference > 16 * torch.finfo(expected.dtype).eps * expected.abs().max())


def _refused(hook: object, name: str) -> GradientError:
    hook_name = getattr(hook, "__qualname__", type(hook).__qualname__)
    return GradientError(
        f"The hook `{hook_name}` of parameter '{name}' is not linear in the gradient, or steps. It sees the gradient "
        f"of this rank's samples before ranks average it, and would train another model than one process. {_REMEDY}"
    )
