"""Where a model keeps its lazy tensors, and how real ones take their place in the same objects."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_runtime.lazy.tensor import OWN_ATTRIBUTES, LazyTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from booster_runtime.lazy.log import Ref
    from booster_runtime.lazy.recorder import Recorder

_MAX_DEPTH = 4
"""How deep lists, tuples and dicts in a module's attributes are searched."""


@dataclass(eq=False)
class Holder:
    """One lazy tensor of a model.

    Args:
        tensor: The tensor object; it stays the same object when it gets values.
        ref: Its place in the recording.
        recorder: The recording.
        is_parameter: Whether it is a parameter, and not a buffer or a plain attribute.
        names: Its names, first in the order of ``state_dict``; empty for a plain attribute.
        places: The modules' dictionaries that hold it, and its key there.
    """

    tensor: torch.Tensor
    ref: Ref
    recorder: Recorder
    is_parameter: bool = False
    names: list[str] = field(default_factory=list)
    places: list[tuple[dict[str, Any], str]] = field(default_factory=list)

    def cut(self) -> None:
        """Let go of the graph that a plain attribute may hang on; it would hold on to parameters."""
        if not self.tensor.is_leaf:
            torch.utils.swap_tensors(self.tensor, self.tensor.detach())  # type: ignore[no-untyped-call]

    def become(self, value: torch.Tensor) -> None:
        """Let the tensor object be a real (or meta) tensor from now on.

        Where something in C++ holds on to the object (a graph, a weak reference), another one takes its place.

        Args:
            value: The values; becomes the memory of the tensor.
        """
        old = self.tensor
        needs_grad = old.requires_grad and value.is_floating_point()
        new: torch.Tensor = nn.Parameter(value, requires_grad=old.requires_grad) if self.is_parameter else value
        if not self.is_parameter and old.is_leaf and needs_grad:
            new = value.requires_grad_()
        new.__dict__.update({key: kept for key, kept in old.__dict__.items() if key not in OWN_ATTRIBUTES})
        hooks = old._backward_hooks if old.is_leaf else None  # noqa: SLF001 - hooks move with the parameter
        try:
            torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
        except RuntimeError:
            self.tensor = new
            for holder, key in self.places:
                holder[key] = new
        if hooks:
            self.tensor._backward_hooks = hooks  # noqa: SLF001


def find_holders(model: nn.Module) -> list[Holder]:
    """Return the lazy tensors of a model, each once: plain attributes first, then buffers, then parameters.

    Collective: none.
    """
    found: dict[int, Holder] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        for is_parameter, tensors in ((True, module._parameters), (False, module._buffers)):  # noqa: SLF001 - the dictionaries themselves
            for name, tensor in tensors.items():
                if isinstance(tensor, LazyTensor):
                    holder = _hold(found, tensor)
                    holder.is_parameter |= is_parameter
                    holder.names.append(start + name)
                    holder.places.append((tensors, name))
        for key, value in vars(module).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                for tensor in _inside(value, _MAX_DEPTH):
                    holder = _hold(found, tensor)
                    if tensor is value:
                        holder.places.append((vars(module), key))
    return sorted(found.values(), key=lambda holder: (holder.is_parameter, bool(holder.names)))


@contextlib.contextmanager
def loosened(model: nn.Module) -> Iterator[None]:
    """Let recurrent modules go of their weak references to weights, which keep the weights from changing in place."""
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []  # noqa: SLF001 - as its own `_apply` does
    try:
        yield
    finally:
        for module in recurrent:
            module._init_flat_weights()  # noqa: SLF001


def _hold(found: dict[int, Holder], tensor: LazyTensor) -> Holder:
    recorder = tensor.lazy_recorder
    return found.setdefault(id(tensor), Holder(tensor, recorder.ref_of(tensor), recorder))


def _inside(value: Any, depth: int) -> Iterator[LazyTensor]:
    if isinstance(value, LazyTensor):
        yield value
    elif depth and isinstance(value, (list, tuple)):
        for item in value:
            yield from _inside(item, depth - 1)
    elif depth and isinstance(value, dict):
        with contextlib.suppress(RuntimeError):  # a dictionary that changes while it is read is nobody's weights
            for item in value.values():
                yield from _inside(item, depth - 1)
