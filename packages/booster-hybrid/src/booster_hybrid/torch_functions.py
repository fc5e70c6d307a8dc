"""What is known of torch's functions: which ask for facts, draw random numbers, work on each element, or write.

`outside_of_graphs` keeps a function of ours out of the graphs of ``torch.compile``: what a collective does can't be
traced, as it tells other processes addresses, and waits for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


FACTS = (
    *("dtype", "device", "layout", "requires_grad", "grad_fn", "is_leaf", "is_cuda", "is_sparse", "is_nested"),
    *("is_quantized", "is_meta", "dim", "ndim", "is_floating_point", "is_complex", "is_contiguous", "element_size"),
    *("get_device", "names", "register_hook", "retain_grad", "_backward_hooks", "__class__", "_version"),
    *("is_inference", "data_ptr", "untyped_storage", "storage_offset", "as_subclass", "__hash__", "__format__"),
    *("new_tensor", "new_empty", "new_zeros", "new_ones", "new_full"),
)
"""What is as true of a part of a tensor as of the whole."""
_ALIKE = (
    *("data", "float", "half", "bfloat16", "double", "to", "type", "type_as", "cpu", "cuda"),
    *("clone", "detach", "contiguous", "requires_grad_", "neg", "__neg__", "tanh", "tanh_"),
)
"""Functions of each element by itself."""
_SCALED = (
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


def is_assignment(func: Callable[..., Any]) -> bool:
    """Return whether a call sets a tensor's property."""
    return getattr(func, "__name__", "") == "__set__"


def is_elementwise(func: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any], source: Tensor) -> bool:
    """Return whether a call works on each element of a tensor by itself, so that it may work on a part."""
    name = name_of(func)
    if is_assignment(func):
        return False
    if name in _ALIKE:
        return bool(args) and args[0] is source
    return name in _SCALED and all(_is_number(each, source) for each in (*args, *named.values()))


def _is_number(value: Any, source: Tensor) -> bool:
    """Return whether an operand is as good for a part: its own gradient, if it has one, would be that of a part."""
    if value is source or not isinstance(value, Tensor):
        return True
    return value.numel() == 1 and not value.requires_grad


def asks_format(func: Callable[..., Any], args: Sequence[Any], kind: type) -> bool:
    """Return whether a call brings another tensor into the format of one of a kind."""
    return name_of(func) in ("to", "type_as") and bool(args) and not isinstance(args[0], kind)


def writes_in_place(func: Callable[..., Any]) -> bool:
    """Return whether a function writes into its first argument, by its name."""
    name = name_of(func)
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        return True
    return name.startswith("__i") and name not in ("__iter__", "__invert__", "__index__", "__int__")


def changes_in_place(func: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any], kind: type) -> bool:
    """Return whether a call would write into a tensor of a kind."""
    out = named.get("out")
    writes = pytree.tree_leaves(out) if out is not None else []
    if is_assignment(func) or named.get("inplace") or writes_in_place(func):
        writes += args[:1]
    return any(isinstance(each, kind) for each in writes)


F = TypeVar("F", bound="Callable[..., Any]")


def outside_of_graphs(function: F) -> F:
    """Return a function that is never traced.

    Args:
        function: The function or method.
    """
    # `torch.compiler.disable` imports the compiler at once, which takes longer than all the rest; this is what torch's
    # optimizers use, and waits for the first call.
    disabled: Any = _disable_dynamo(function)
    result: F = disabled
    return result


def version_of(tensor: Any) -> int:
    """Return a number that grows when a tensor is written to; one made in inference mode counts nothing."""
    counts = isinstance(tensor, Tensor) and not tensor.is_inference()
    return tensor._version if counts else -1  # noqa: SLF001 - torch tells it nowhere else
