"""Tensors of which each rank has a part, for functions that need the whole: it is put together when one asks.

A subclass of a tensor that looks whole (`booster_hybrid.tensor_parallel.logits`,
`booster_hybrid.sequence_parallel.positions`) answers what it can from its part. Whatever else is called on it is called
on the whole, which all ranks gather then. So every rank must make that call. Code that runs on one rank alone, such as
a metric printed there, would meet a collective of what the others do next: ranks meet before they gather, so that this
ends in an error that says so.

What a call changes in place would be changed in a copy, and raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError, MissingRanksError
from booster_core.ranks import DistCoordinator, NamedCall
from booster_hybrid.tensor_parallel.eager import outside_of_graphs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed import ProcessGroup

_MEETING = "gather of split logits"
FACTS = (
    *("dtype", "device", "layout", "requires_grad", "grad_fn", "is_leaf", "is_cuda", "is_sparse", "is_nested"),
    *("is_quantized", "is_meta", "dim", "ndim", "is_floating_point", "is_complex", "is_contiguous", "element_size"),
    *("get_device", "names", "register_hook", "retain_grad", "_backward_hooks", "__class__", "_version"),
    *("is_inference", "data_ptr", "untyped_storage", "storage_offset", "as_subclass", "__hash__", "__format__"),
    *("new_tensor", "new_empty", "new_zeros", "new_ones", "new_full"),
)
"""What is as true of a part as of the whole."""
ALIKE = (
    *("data", "float", "half", "bfloat16", "double", "to", "type", "type_as", "cpu", "cuda"),
    *("clone", "detach", "contiguous", "requires_grad_", "neg", "__neg__", "tanh", "tanh_"),
)
"""Functions of each element by itself."""
SCALED = (
    *("mul", "mul_", "__mul__", "__rmul__", "__imul__", "div", "div_", "__truediv__", "__itruediv__", "true_divide"),
    *("add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__isub__"),
    *("clamp", "clamp_", "clip"),
)
"""Functions of each element by itself, if the other operands are numbers."""


def name_of(func: Callable[..., Any]) -> str:
    """Return what a torch function, or a tensor's property, is called."""
    name: str = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):  # a tensor's property
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    return name


def is_elementwise(name: str, args: Sequence[Any], named: Mapping[str, Any], source: Tensor) -> bool:
    """Return whether a call works on each element of a tensor by itself, so that it may work on a part."""
    if name in ALIKE:
        return bool(args) and args[0] is source
    return name in SCALED and all(_is_number(each, source) for each in (*args, *named.values()))


def asks_format(name: str, args: Sequence[Any], kind: type) -> bool:
    """Return whether a call brings another tensor into the format of a part."""
    return name in ("to", "type_as") and bool(args) and not isinstance(args[0], kind)


def _is_number(value: Any, source: Tensor) -> bool:
    """Return whether an operand is as good for a part: its own gradient, if it has one, would be that of a part."""
    if value is source or not isinstance(value, Tensor):
        return True
    return value.numel() == 1 and not value.requires_grad


@dataclass
class Kept:
    """A whole tensor that was put together already.

    Args:
        tensor: The whole.
        version: Its count of changes then.
        state: What it was made from and under: the part's count of changes, and whether gradients were recorded.
    """

    tensor: Tensor
    version: int
    state: tuple[int, bool]


def whole_of(kept: Kept | None, part: Tensor, gather: Callable[[], Tensor]) -> Kept:
    """Return the whole tensor, gathered again where the kept one is out of date.

    Args:
        kept: What was put together before.
        part: This rank's part.
        gather: Puts the whole together.

    Collective: as ``gather``, on all its ranks or none.
    """
    state = (version_of(part), torch.is_grad_enabled())
    if kept is not None and kept.state == state:
        return kept
    tensor = gather()
    return Kept(tensor, version_of(tensor), state)


def check_unchanged(kept: Kept | None, what: str) -> None:
    """Refuse to go on where somebody has changed, in place, what was put together: the parts don't know of it.

    Raises:
        ConfigError: If so.
    """
    if kept is not None and version_of(kept.tensor) != kept.version:
        msg = (
            f"A view of {what} was changed in place, which does not reach their parts on the ranks. Change "
            "`logits.gather()` and go on with that, or pass `parallel_output=False`."
        )
        raise ConfigError(msg)


def version_of(tensor: Tensor) -> int:
    """Return a number that grows when a tensor is written to; those made in inference mode count nothing."""
    return -1 if tensor.is_inference() else tensor._version  # noqa: SLF001 - no other way


def changes_in_place(func: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any], kind: type) -> bool:
    """Return whether a call would write into a tensor of a kind."""
    name = name_of(func)
    out = named.get("out")
    writes = pytree.tree_leaves(out) if out is not None else []
    if getattr(func, "__name__", "") == "__set__" or named.get("inplace"):
        writes += args[:1]
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        writes += args[:1]
    if name.startswith("__i") and name not in ("__iter__", "__invert__", "__index__", "__int__"):
        writes += args[:1]
    return any(isinstance(each, kind) for each in writes)


@outside_of_graphs
def on_whole(
    func: Callable[..., Any],
    args: Sequence[Any],
    named: Mapping[str, Any],
    kind: type,
    group: ProcessGroup | None,
    gather: Callable[[Any], Tensor],
) -> Any:
    """Call a function with whole tensors in the place of parts.

    Args:
        func: The function.
        args: Its arguments; parts may be anywhere in them.
        named: Its keyword arguments.
        kind: The class of parts.
        group: The ranks that gather.
        gather: Returns the whole of a part.

    Raises:
        MissingRanksError: If some of these ranks do not make the call.

    Collective: the group.
    """
    name = name_of(func)
    ranks = None if group is None else dist.get_process_group_ranks(group)
    with NamedCall(_MEETING, ranks):
        meet(name, group)
        whole_args, whole_named = pytree.tree_map_only(kind, gather, (tuple(args), dict(named)))
    return func(*whole_args, **whole_named)


def meet(name: str, group: ProcessGroup | None) -> None:
    """Wait until all ranks of the gather have called.

    Args:
        name: What was called.
        group: The ranks.

    Raises:
        MissingRanksError: If some do not come.

    Collective: the group.
    """
    try:
        DistCoordinator().block_all(group, name=_MEETING)
    except MissingRanksError as error:
        msg = (
            f"{error} `{name}` needs whole logits, of which each of these ranks has a part. Let all of them call it, "
            "look at `logits.local()` on one, or pass `parallel_output=False`."
        )
        raise MissingRanksError(msg) from error
