"""Find where lazy tensors are kept, and let real ones take their place in the same objects.

Eager models on the host are sharded as lazy ones are: a device gets its shards, and never the whole model. Moved whole,
a model that is larger than a device would end in `boost`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from booster_core.errors import LazyInitError
from booster_core.state import box_numel, full_box, slices_of
from booster_runtime.lazy.tensor import OWN_ATTRIBUTES, LazyTensor
from booster_runtime.sharding.hosting import is_cut
from booster_runtime.sharding.ranks import send_first

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from booster_core.plugin import BoostContext
    from booster_core.ranks import Together
    from booster_core.state import Box
    from booster_runtime.lazy.log import Ref
    from booster_runtime.lazy.recorder import Recorder
    from booster_runtime.lazy.recording import Filling

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
                    f"A lazy tensor of shape {tuple(old.shape)} in a list, tuple or dict of a module can't get its "
                    f"values in place: {reason}. Make it outside of `LazyInitContext`, or register it as a buffer."
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
    """

    ref: Ref = field(kw_only=True)
    recorder: Recorder = field(kw_only=True)

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


def find_elsewhere(
    model: nn.Module, optimizers: Sequence[Optimizer] = (), criterion: object = None
) -> list[LazyHolder]:
    """Return the lazy tensors of optimizer state and of a criterion's modules that are not a model's own.

    State that optimizers make at their construction, such as Adagrad's, is lazy where the parameters are.
    """
    found: dict[int, LazyHolder] = {}
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, LazyTensor):
                    _hold(found, value).places.append((state, key))
    for module in criterion.modules() if isinstance(criterion, nn.Module) else ():
        _add_holders(found, module, "")
    own = {id(holder.tensor) for holder in find_holders(model)}
    return [holder for key, holder in found.items() if key not in own]


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


_STAYS = "parameters stay on the host"
_SENT_BYTES = 1 << 24
"""Most of a parameter that is on the device on its way to shards."""


def shards_from_host(context: BoostContext) -> bool:
    """Return whether an eager model's parameters stay on the host until a device gets its shards of them.

    They do where ranks have found that this is possible on all of them, before `boost` changed anything.
    """
    return bool(context.prepared.get(_STAYS, False))


def compare_hosts(model: nn.Module, context: BoostContext, meeting: Together) -> None:
    """Find out on this rank what `shards_from_host` returns after the meeting.

    Args:
        model: The user's model.
        context: Device of the run; keeps the answer.
        meeting: Of all ranks.
    """
    is_possible = context.device.type != "cpu" and all(map(_is_plain, model.parameters()))
    context.prepared[_STAYS] = is_possible
    meeting.compare(is_possible, differs=lambda: context.prepared.update({_STAYS: False}))


def _is_plain(parameter: nn.Parameter) -> bool:
    is_expanded = any(
        size > 1 and stride == 0 for size, stride in zip(parameter.shape, parameter.stride(), strict=True)
    )
    is_dense = parameter.device.type == "cpu" and parameter.layout == torch.strided and not is_expanded
    return is_dense and type(parameter) is nn.Parameter and type(parameter.data) is torch.Tensor


class StateOnHost:
    """Optimizer state that exists before `boost`, kept on the host until this rank's part is cut.

    There is some after training or loading before `boost`, and always for Adagrad.

    Args:
        optimizer: The user's optimizer, whose parameters are on the host.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._kept: dict[Tensor, dict[str, Tensor]] = {}

    def take(self) -> None:
        """Take state of a parameter's shape out of the optimizer; what is left is small, and may go anywhere."""
        for parameter, state in self._optimizer.state.items():
            if not isinstance(state, dict) or not isinstance(parameter, torch.Tensor):
                continue
            tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
            large = {
                key: value
                for key, value in tensors.items()
                if value.device.type == "cpu" and is_cut(key, value, parameter.shape)
            }
            for key in large:
                del state[key]
            self._kept[parameter] = large

    def give_back(self, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Give the optimizer the state that was taken, as it is.

        Args:
            replaced: Parameters that are other objects by now, and those in their place.
        """
        for parameter, large in self._kept.items():
            self._optimizer.state[replaced.get(cast("nn.Parameter", parameter), parameter)].update(large)
        self._kept = {}


class HostSource:
    """The values of an eager model on the host: the first rank's parameters, sent in pieces.

    Args:
        model: A model for which `shards_from_host` holds.
    """

    def __init__(self, model: nn.Module) -> None:
        self.holders = find_parameters(model)
        self._values = [holder.tensor.detach() for holder in self.holders]
        self._absent: Collection[int] = ()

    def leave_out(self, absent: Collection[int]) -> None:
        """Keep nothing of parameters that the model has lost since; other ranks may still have them."""
        self._absent = {id(holder) for holder in self.holders if id(holder.tensor) in absent}

    def give(self, filling: Filling) -> None:
        """Send each parameter, of which a few megabytes are on the device at a time.

        Raises:
            Exception: What went wrong on this rank, after it has taken part for the others.

        Collective: every rank of the world.
        """
        error: Exception | None = None
        for holder in self.holders:
            value = self._values.pop(0)
            device = filling.device or value.device
            shards = filling.shards_of(holder)
            is_whole = shards is None and id(holder) not in self._absent
            whole = torch.empty_like(value, device=device) if is_whole else None
            for box in _boxes(full_box(tuple(value.shape)), _SENT_BYTES // value.element_size()):
                part = value[slices_of(box)].to(device).contiguous()
                send_first([part])
                if whole is not None:
                    whole[slices_of(box)] = part
                if error is None:
                    try:
                        filling.write(shards or (), part, box)
                    except Exception as caught:  # noqa: BLE001 - raised below: other ranks go on
                        error = caught
                del part  # before there is memory for the next one
            if whole is not None:
                holder.become(whole)
        if error is not None:
            raise error


def _boxes(box: Box, most: int) -> Iterator[Box]:
    """Cut a box, along as few dimensions as possible, into ones of at most so many elements."""
    dim = next((dim for dim, (start, stop) in enumerate(box) if stop - start > 1), None)
    if box_numel(box) <= most or dim is None:
        yield box
        return
    start, stop = box[dim]
    step = max(most * (stop - start) // box_numel(box), 1)
    for first in range(start, stop, step):
        yield from _boxes((*box[:dim], (first, min(first + step, stop)), *box[dim + 1 :]), most)
