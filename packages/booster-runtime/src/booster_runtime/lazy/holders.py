"""Find where lazy tensors are kept, and let real ones take their place in the same objects."""

from __future__ import annotations

import contextlib
import gc
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_core.errors import LazyInitError
from booster_runtime.lazy.tensor import OWN_ATTRIBUTES, LazyTensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from booster_runtime.lazy.log import Ref
    from booster_runtime.lazy.recorder import Recorder

_MAX_DEPTH = 4
"""How deep lists, tuples and dicts in a module's attributes are searched."""


HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Where torch keeps a tensor's hooks, apart from its ``__dict__``."""


@dataclass(eq=False)
class Holder:
    """One tensor of a model that gets its values later.

    Args:
        tensor: The tensor object; it stays the same object when it gets values, where torch allows it.
        is_parameter: Whether it is a parameter, and not a buffer or a plain attribute.
        names: Its names, first in the order of ``state_dict``; empty for a plain attribute.
        places: The modules' dictionaries that hold it, and its key there.

    Attributes:
        given: The tensor object that the model had first.
    """

    tensor: torch.Tensor
    is_parameter: bool = False
    names: list[str] = field(default_factory=list)
    places: list[tuple[dict[str, Any], str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Remember the tensor object."""
        self.given = self.tensor

    def hollow(self, device: torch.device) -> torch.Tensor:
        """Return a tensor without values of the same geometry: on meta, or with one element of a device's memory."""
        like = self._on_meta()
        return like if device.type == "meta" else torch.zeros((), dtype=like.dtype, device=device).expand(like.shape)

    def _on_meta(self) -> torch.Tensor:
        return torch.empty_like(self.tensor.detach(), device="meta")

    def become(self, value: torch.Tensor) -> None:
        """Let the tensor object be a real (or meta) tensor from now on.

        Where something in C++ holds on to the object (a graph, a weak reference), another one takes its place.

        Args:
            value: The values; becomes the memory of the tensor.

        Raises:
            LazyInitError: If another object would have to take its place, and it is not known where.
        """
        old = self.tensor
        needs_grad = old.requires_grad and value.is_floating_point()
        new: torch.Tensor = nn.Parameter(value, requires_grad=old.requires_grad) if self.is_parameter else value
        if not self.is_parameter and old.is_leaf and needs_grad:
            new = value.requires_grad_()
        new.__dict__.update({key: kept for key, kept in old.__dict__.items() if key not in OWN_ATTRIBUTES})
        hooks = _hooks_of(old)
        reason = _swap(old, new)
        if reason:
            if not self.places:
                msg = (
                    f"A lazy tensor of shape {tuple(old.shape)} outside of the model's modules, held by "
                    f"{_referrers(old)}, can't get its values in place: {reason}. Make it outside of "
                    "`LazyInitContext`, or register it as a buffer of the model."
                )
                raise LazyInitError(msg)
            self.tensor = new
            for holder, key in self.places:
                holder[key] = new
        for name, registered in hooks.items():
            setattr(self.tensor, name, registered)


@dataclass(eq=False)
class LazyHolder(Holder):
    """One lazy tensor of a model.

    Args:
        ref: Its place in the recording.
        recorder: The recording.
        is_elsewhere: Whether no module holds it: it stays on the device that it was recorded on.
    """

    ref: Ref = field(kw_only=True)
    recorder: Recorder = field(kw_only=True)
    is_elsewhere: bool = field(default=False, kw_only=True)

    def cut(self) -> bool:
        """Let go of the graph, or the tensor that this is a view of; return whether nothing is left of them.

        They hold on to other tensors, which then can't get their values in place.
        """
        holds = not self.tensor.is_leaf or (self.tensor._is_view() and not self.tensor.requires_grad)  # noqa: SLF001
        return not holds or not _swap(self.tensor, self.tensor.detach())

    def _on_meta(self) -> torch.Tensor:
        return torch.empty_strided(self.ref.size, self.ref.stride, dtype=self.ref.dtype, device="meta")


def find_parameters(model: nn.Module) -> list[Holder]:
    """Return the parameters of an eager model, each once."""
    found: dict[int, Holder] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():  # noqa: SLF001 - the dictionary itself
            if parameter is not None:
                holder = found.setdefault(id(parameter), Holder(parameter, is_parameter=True))
                holder.names.append(f"{prefix}.{name}" if prefix else name)
                holder.places.append((module._parameters, name))  # noqa: SLF001
    return list(found.values())


def find_holders(model: nn.Module) -> list[LazyHolder]:
    """Return the lazy tensors of a model, each once: plain attributes first, then buffers, then parameters."""
    found: dict[int, LazyHolder] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        _add_holders(found, module, f"{prefix}." if prefix else "")
    return sorted(found.values(), key=lambda holder: (holder.is_parameter, bool(holder.names)))


def find_elsewhere(model: nn.Module, *also: object) -> list[LazyHolder]:
    """Return the living lazy tensors of a model's recordings that are not the model's: in closures, caches, optimizers.

    What other modules hold is left out: those are models of their own.

    Args:
        model: The model.
        also: What belongs to it. The tensors of modules among these are returned too, and their recordings looked at.
    """
    own = find_holders(model)
    modules = [other for other in also if isinstance(other, nn.Module)]
    recorders = {id(holder.recorder) for module in (model, *modules) for holder in find_holders(module)}
    if not recorders:
        return []
    gc.collect()  # what only garbage holds needs no values
    living = gc.get_objects()
    found: dict[int, LazyHolder] = {}
    known = {id(holder.tensor) for holder in own}
    for tensor in living:
        if type(tensor) is LazyTensor and id(tensor) not in known and id(tensor.lazy_recorder) in recorders:
            _hold(found, tensor)
    if not found:
        return []
    included = {id(module) for each in (model, *modules) for module in each.modules()}
    others: dict[int, LazyHolder] = {}
    for module in living:
        if issubclass(type(module), nn.Module) and id(module) not in included and "_modules" in vars(module):
            _add_holders(others, module, "")
    elsewhere = [holder for key, holder in found.items() if key not in others]
    for holder in elsewhere:
        holder.is_elsewhere = True
        holder.is_parameter = isinstance(holder.tensor, nn.Parameter)
    return elsewhere


def cut_all(holders: Sequence[LazyHolder]) -> None:
    """Let tensors go of graphs and of each other."""
    held = list(holders)
    while len(rest := [holder for holder in held if not holder.cut()]) < len(held):
        held = rest


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


def _add_holders(found: dict[int, LazyHolder], module: nn.Module, start: str) -> None:
    """Add the lazy tensors that a module itself holds, under names that begin with ``start``."""
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


def _swap(old: torch.Tensor, new: torch.Tensor) -> str:
    """Exchange the contents of two tensor objects; return the reason where torch does not."""
    try:
        torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return str(error).rstrip(". ")
    return ""


def _hooks_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the hooks of a leaf, which move with it."""
    return {name: getattr(tensor, name) for name in HOOKS if getattr(tensor, name, None)} if tensor.is_leaf else {}


def _referrers(tensor: torch.Tensor) -> str:
    """Return the kinds of objects that hold a tensor, for a message."""
    kinds = []
    for referrer in gc.get_referrers(tensor):
        if isinstance(referrer, types.CellType):
            kinds.append("a closure")
        elif isinstance(referrer, dict):
            if referrer.get("tensor") is tensor and "recorder" in referrer:
                continue  # a `Holder`
            owners = [type(owner).__name__ for owner in gc.get_referrers(referrer) if _vars_of(owner) is referrer]
            kinds += [f"a {name}" for name in owners[:1]] or [f"a dict under {_key_of(referrer, tensor)!r}"]
        elif not isinstance(referrer, (types.FrameType, Holder)):
            kinds.append(f"a {type(referrer).__name__}")
    return ", ".join(dict.fromkeys(kinds)) or "a local variable"


def _vars_of(owner: object) -> object:
    """Return an object's ``__dict__``, if it has one of its own."""
    return getattr(owner, "__dict__", None)


def _key_of(holder: dict[Any, Any], tensor: torch.Tensor) -> object:
    return next((key for key, value in holder.items() if value is tensor), None)


def _hold(found: dict[int, LazyHolder], tensor: LazyTensor) -> LazyHolder:
    recorder = tensor.lazy_recorder
    return found.setdefault(id(tensor), LazyHolder(tensor, ref=recorder.ref_of(tensor), recorder=recorder))


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
