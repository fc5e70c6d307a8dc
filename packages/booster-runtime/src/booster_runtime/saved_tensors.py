"""Hooks on what autograd saves for backward that stack: torch calls the innermost alone, these ask the others around.

A subclass of `SavedTensorHooks` takes what is its own; everything else is kept in the way of the hooks around it, or as
it is where there are none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["SavedTensorHooks"]

_CHECKPOINT = "torch.utils.checkpoint"
"""The module whose hooks save nothing, or what was just recomputed."""


class SavedTensorHooks(ABC):
    """Hooks that take some tensors; `take` and `give` are the subclass's.

    Collective: none of its methods.
    """

    def __init__(self) -> None:
        self._levels: list[_Level] = []

    @abstractmethod
    def take(self, tensor: Tensor) -> Any:
        """Return what to save in a tensor's place; ``None`` to leave it to others."""

    @abstractmethod
    def give(self, taken: Any) -> Tensor:
        """Return the tensor in whose place something was saved."""

    def push(self, *, before_saving: bool = False) -> bool:
        """Look at what is saved from now on, and return whether that is so.

        It is not where nothing is saved, and under a checkpoint, which saves nothing either. What others keep in
        their way, they are still asked to keep.

        Args:
            before_saving: Gradients are off now, but will be on again when something is saved.
        """
        if not torch.is_grad_enabled() and not before_saving:
            return False
        autograd: Any = torch._C._autograd  # noqa: SLF001 - torch's own hooks ask so
        if not autograd._saved_tensors_hooks_is_enabled():  # noqa: SLF001
            return False
        others = _top_hooks()
        if others is not None and (_owner(others[0]) is self or _CHECKPOINT in others[0].__module__):
            return False
        level = _Level(self, others)
        self._levels.append(level)
        autograd._push_saved_tensors_default_hooks(level.pack, level.unpack)  # noqa: SLF001
        return True

    def is_on(self) -> bool:
        """Return whether what is saved now is looked at, because a frame around has pushed."""
        top = _top_hooks() if self._levels else None
        return top is not None and _owner(top[0]) is self

    def pop(self) -> None:
        """Stop what `push` has begun."""
        self._levels.pop()
        autograd: Any = torch._C._autograd  # noqa: SLF001
        autograd._pop_saved_tensors_default_hooks()  # noqa: SLF001 - what torch's own context does, for each module


class _Level:
    """The hooks of one `push`, which know those around them: the same hooks may be further out once more.

    Args:
        hooks: Whose they are.
        others: The pair of hooks around, if there is one.
    """

    def __init__(self, hooks: SavedTensorHooks, others: Any) -> None:
        self.hooks = hooks
        self._take = hooks.take
        self._others = others

    def pack(self, tensor: Tensor) -> Any:
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - as torch's own modes do
            taken = self._take(tensor)
            if taken is not None:
                return None, taken
            if self._others is not None:
                return _Kept(self._others[0](tensor), self._others[1])
            # Detached: an output would keep its own graph alive, and that the output. It has the same version.
            return tensor.detach(), tensor._version  # noqa: SLF001 - autograd's own check, which hooks switch off

    def unpack(self, saved: Any) -> Tensor:
        if type(saved) is _Kept:
            return saved.unpack(saved.packed)
        tensor: Tensor | None
        tensor, kept = saved
        if tensor is None:
            return self.hooks.give(kept)
        if tensor._version != kept:  # noqa: SLF001
            msg = (
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {tuple(tensor.shape)} is at version {tensor._version}, expected version {kept}."  # noqa: SLF001
            )
            raise RuntimeError(msg)
        return tensor


@dataclass(slots=True)
class _Kept:
    """What somebody else's hooks keep."""

    packed: Any
    unpack: Callable[[Any], Tensor]


def _owner(pack: Any) -> SavedTensorHooks | None:
    level = getattr(pack, "__self__", None)
    return level.hooks if isinstance(level, _Level) else None


def _top_hooks() -> Any:
    """Return the pair of hooks that torch calls for what is saved now; ``None`` where there are none."""
    autograd: Any = torch._C._autograd  # noqa: SLF001 - torch's own hooks ask so
    return autograd._top_saved_tensors_default_hooks(True)  # noqa: FBT003, SLF001
