"""What ``parameter.grad`` is while a gradient is split over the ranks: a stand-in, which raises when it is read.

With ``None`` there, ``torch.nn.utils.clip_grad_norm_`` would clip nothing, and a script that logs norms would log none,
both without a word. Scripts may drop a gradient by ``parameter.grad = None``, as `StandIns.take_dropped` tells, and
set it to zero by ``parameter.grad.zero_()``.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch._C import DisableTorchFunctionSubclass

from booster_core.errors import GradientError
from booster_runtime.memory import only_describes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from torch import Tensor, nn
    from typing_extensions import Self

_ZERO = frozenset({torch.Tensor.zero_, torch._foreach_zero_})
_ACCUMULATE: frozenset[Any] = frozenset({torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor})
"""What autograd calls to add a gradient to one that is there."""


class ShardedGradient(torch.Tensor):
    """Stands for a gradient that is split over the ranks. It has its shape, dtype and device, but no values.

    Args:
        parameter: The parameter whose gradient it is.
        name: The parameter's name.
        zero: Sets the gradient to zero.
    """

    parameter_name: str
    make_zero: Callable[[], None]
    added: Tensor | None
    """What autograd has added; taken by the hook that runs right after."""

    def __new__(cls, parameter: Tensor, name: str, zero: Callable[[], None]) -> Self:
        make: Any = torch.Tensor._make_wrapper_subclass  # noqa: SLF001 - the documented way
        made: Self = make(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device)
        made.parameter_name = name
        made.make_zero = zero
        made.added = None
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return f"{type(self).__name__}('{self.parameter_name}', shape={tuple(self.shape)}, dtype={self.dtype})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Refuse a copy, which would be one of values."""
        self.refuse()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled."""
        self.refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what describes the gradient, set it to zero, and raise for everything else."""
        if only_describes(func) or func is torch.Tensor.detach_:
            with DisableTorchFunctionSubclass():
                return args[0] if func is torch.Tensor.detach_ else func(*args, **(kwargs or {}))
        found = list(_among((*args, *(kwargs or {}).values())))
        if func in _ZERO:
            for each in found:
                each.make_zero()
            return args[0] if func is torch.Tensor.zero_ else None
        return found[0].refuse()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Keep what autograd adds, and raise for everything else."""
        found = next(iter(_among((*args, *(kwargs or {}).values()))))
        is_in_backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001 - no public name
        if func not in _ACCUMULATE or not is_in_backward or args[0] is not found:
            found.refuse()
        # Autograd adds in place, except under `create_graph=True`.
        kept = (
            found
            if func is torch.ops.aten.add_.Tensor
            else ShardedGradient(found, found.parameter_name, found.make_zero)
        )
        # A copy: autograd may pass the same tensor on to others.
        kept.added = args[1].clone() if found.added is None else found.added + args[1]
        return kept

    def take_added(self) -> Tensor | None:
        """Return what autograd has added since the last call; ``None`` for nothing."""
        added, self.added = self.added, None
        return added

    def refuse(self) -> NoReturn:
        """Raise, because there are no values.

        Raises:
            GradientError: Always.
        """
        name = self.parameter_name
        msg = (
            f"The gradient of '{name}' is split over the ranks, so that `parameter.grad` has no values to read or "
            "change. To clip, and for the norm, call `optimizer.clip_grad_by_norm(max_norm)`, or "
            "`optimizer.clip_grad_by_value`; `max_norm=float('inf')` returns the norm alone. To read the gradient, "
            f"call `booster_runtime.full_gradient(booster, model, '{name}')` on every rank. "
            "`optimizer.zero_grad()` and `parameter.grad = None` drop it."
        )
        raise GradientError(msg)


class StandIns:
    """The stand-ins of a model's parameters.

    Args:
        names: The parameters' names, by number.
        zero: Sets the gradient of a parameter, given by its number, to zero.
    """

    def __init__(self, names: Mapping[int, str], zero: Callable[[int], None]) -> None:
        self._names = names
        self._zero = weakref.WeakMethod(zero)
        self._made: dict[int, ShardedGradient] = {}
        self._shown: dict[int, nn.Parameter] = {}
        self._hidden: dict[int, nn.Parameter] = {}

    def show(self, index: int, parameter: nn.Parameter) -> bool:
        """Let a parameter's gradient be its stand-in, and return whether it was given that before."""
        was_shown = index in self._shown
        if index not in self._made:
            self._made[index] = ShardedGradient(parameter, self._names[index], self._zeroing(index))
        parameter.grad = self._made[index]
        self._shown[index] = parameter
        return was_shown

    def has(self, index: int) -> bool:
        """Whether a parameter was given its stand-in, also where this is hidden."""
        return index in self._shown or index in self._hidden

    def not_shown(self, indices: AbstractSet[int]) -> AbstractSet[int]:
        """Return which of some parameters were given no stand-in, or one that is hidden."""
        return indices - self._shown.keys()

    # Absent parameters answer these questions at once: none needs values.

    def hide(self) -> None:
        """Take the stand-ins away, so that autograd makes gradients without them, until `show_again`.

        Raises:
            GradientError: If somebody has given a parameter another gradient in place of its stand-in.
        """
        with DisableTorchFunctionSubclass():
            for index, parameter in self._shown.items():
                if type(parameter.grad) not in (ShardedGradient, type(None)):
                    raise assigned_error(self._names[index])
                parameter.grad = None
        self._hidden, self._shown = self._shown, {}

    def show_again(self) -> None:
        """Show what was hidden, except where there is a gradient by now."""
        with DisableTorchFunctionSubclass():
            for index, parameter in self._hidden.items():
                if parameter.grad is None:
                    self.show(index, parameter)
        self._hidden = {}

    def take_dropped(self) -> tuple[list[int], bool]:
        """Return the parameters whose gradient somebody has set to ``None`` since it was shown, and forget them.

        Returns:
            The parameters, and whether these are all that there are.
        """
        with DisableTorchFunctionSubclass():
            dropped = [index for index, parameter in self._shown.items() if parameter.grad is None]
        for index in dropped:
            del self._shown[index]
        return dropped, bool(dropped) and not self._shown

    def clear(self, indices: AbstractSet[int]) -> None:
        """Count the stand-ins of some parameters as not shown; whoever calls this sets the gradients."""
        self._shown = {index: each for index, each in self._shown.items() if index not in indices}
        self._hidden = {index: each for index, each in self._hidden.items() if index not in indices}

    def _zeroing(self, index: int) -> Callable[[], None]:
        method = self._zero  # weak: a parameter must not keep alive what it belongs to

        def zero() -> None:
            call = method()
            if call is not None:
                call(index)

        return zero


def holds_values(gradient: Tensor | None) -> bool:
    """Whether there are values in a parameter's ``grad``: no stand-in, or one that autograd has added to."""
    if type(gradient) is ShardedGradient:
        return gradient.added is not None
    return gradient is not None


def assigned_error(name: str) -> GradientError:
    """Return the error for a gradient that was made by hand."""
    msg = (
        f"`parameter.grad` of '{name}' was assigned by hand. Gradients are split over the ranks as backward makes "
        "them, and the optimizer would not see this one. Let backward make it: call "
        "`booster.backward((parameter * gradient).sum(), optimizer)`, whose results are averaged over the ranks."
    )
    return GradientError(msg)


def _among(values: Iterable[Any]) -> Iterable[ShardedGradient]:
    for value in values:
        if isinstance(value, ShardedGradient):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _among(value)
