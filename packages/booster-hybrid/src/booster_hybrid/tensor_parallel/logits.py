"""`SplitLogits`: logits of which each rank has its part of the vocabulary, and nobody the whole.

They look whole: their shape is that of all logits, and cross entropy over them is that of all. What would need more
than the part that is here raises, instead of answering for that part alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from booster_core import collectives
from booster_core.errors import ConfigError
from booster_hybrid.tensor_parallel.collectives import gather_last
from booster_hybrid.tensor_parallel.loss import vocabulary_cross_entropy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from booster_hybrid.tensor_parallel.group import TensorGroup

_ALIKE = (
    *("data", "float", "half", "bfloat16", "double", "to", "type", "type_as", "cpu", "cuda"),
    *("clone", "detach", "contiguous", "requires_grad_", "neg", "__neg__", "tanh", "tanh_"),
)
"""Functions of each logit by itself."""
_SCALED = (
    *("mul", "mul_", "__mul__", "__rmul__", "__imul__", "div", "div_", "__truediv__", "__itruediv__", "true_divide"),
    *("add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__isub__"),
    *("clamp", "clamp_", "clip"),
)
"""Functions of each logit by itself, if the other operands are numbers."""
_FACTS = (
    *("dtype", "device", "layout", "requires_grad", "grad_fn", "grad", "is_leaf", "is_cuda", "is_sparse", "is_nested"),
    *("is_quantized", "is_meta", "dim", "ndim", "is_floating_point", "is_complex", "is_contiguous", "element_size"),
    *("get_device", "names", "register_hook", "retain_grad", "_backward_hooks", "__class__", "_version"),
    *("is_inference", "data_ptr", "untyped_storage", "storage_offset", "__len__", "as_subclass", "backward"),
)
"""What is as true of the part here as of the whole."""


class SplitLogits(Tensor):
    """This rank's part of logits of shape ``(..., vocabulary)``, made by `split_logits`.

    Cross entropy, ``argmax(-1)``, conversions, products with numbers, and views and indices that leave the vocabulary
    alone work as on whole logits; everything else raises. `local` is the part here, `gather` puts the whole together.

    Reference: Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053), section 3.
    """

    _sizes: tuple[int, ...]
    _tensor_group: TensorGroup

    def local(self) -> Tensor:
        """Return the part that is here, shape ``(..., local vocabulary)``, as a plain tensor.

        Collective: none.
        """
        return self.as_subclass(Tensor)

    def first(self) -> int:
        """Return the index of the first local logit in the whole vocabulary."""
        return sum(self._sizes[: self._tensor_group.rank])

    def gather(self, *_: Any) -> Tensor:  # type: ignore[override]  # a tensor's own gather would see a part
        """Return the whole logits as a plain tensor.

        Collective: the tensor parallel ranks.
        """
        return gather_last(self.local(), self._sizes, self._tensor_group)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]  # the same as torch's
        """Return what is here of what."""
        start = self.first()
        return (
            f"SplitLogits({start}:{start + self._sizes[self._tensor_group.rank]} of {sum(self._sizes)}, {self.local()})"
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer for the whole logits, or raise."""
        del types
        named = dict(kwargs or {})
        with DisableTorchFunctionSubclass():
            return _answer(func, tuple(args), named)


def split_logits(local: Tensor, sizes: Sequence[int], group: TensorGroup) -> Tensor:
    """Return a part of logits that answers for the whole.

    Args:
        local: Shape ``(..., sizes[rank])``.
        sizes: Length of each rank's part of the vocabulary.
        group: The tensor parallel ranks.

    Collective: none.
    """
    with DisableTorchFunctionSubclass():
        logits = local.as_subclass(SplitLogits)
    logits._sizes, logits._tensor_group = tuple(sizes), group  # noqa: SLF001 - made here
    return logits


def _name_of(func: Callable[..., Any]) -> str:
    name: str = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):  # a tensor's property
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    return name


def _answer(func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    name = _name_of(func)
    found = [each for each in (*args, *named.values()) if isinstance(each, SplitLogits)]
    if not found:
        return _of_several(name, args, named)
    source = found[0]
    if name in _FACTS:
        return func(*args, **named)
    if name in _ALIKE or (name in _SCALED and all(_is_number(each, source) for each in (*args, *named.values()))):
        return _like(func(*args, **named), source)
    if named.get("input") is source:
        args = (named.pop("input"), *args)
    answer = _ANSWERS[name](source, *args[1:], **named) if name in _ANSWERS and args[0] is source else None
    if answer is None:
        raise _refused(name, source)
    return answer


def _shape(source: SplitLogits, dim: int | None = None) -> torch.Size | int:
    whole = torch.Size((*Tensor.size(source)[:-1], sum(source._sizes)))  # noqa: SLF001 - our own
    return whole if dim is None else whole[dim]


def _property(source: SplitLogits, *_: Any) -> torch.Size | int:
    """Return the shape for a getter, which gets the class too."""
    return _shape(source)


def _numel(source: SplitLogits) -> int:
    return torch.Size(_shape(source)).numel()  # type: ignore[arg-type]


def _view(source: SplitLogits, *shape: Any, **_: Any) -> Any:
    if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        shape = tuple(shape[0])
    lead = Tensor.size(source)[:-1]
    if not shape or any(not isinstance(size, int) for size in shape):
        return None
    if shape[-1] == sum(source._sizes) or (shape[-1] == -1 and torch.Size(shape[:-1]).numel() == lead.numel()):  # noqa: SLF001
        return _like(Tensor.reshape(source, (*shape[:-1], Tensor.size(source, -1))), source)
    return None


def _flatten(source: SplitLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    is_apart = end_dim % source.dim() < source.dim() - 1
    return _like(Tensor.flatten(source, start_dim, end_dim), source) if is_apart else None


def _index(source: SplitLogits, index: Any) -> Any:
    return _like(Tensor.__getitem__(source, index), source) if _leaves_last(index, source.dim()) else None


def _of_several(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Put logits of several batches after each other."""
    parts: Any = args[0] if args else named.get("tensors")
    dim = args[1] if len(args) > 1 else named.get("dim", 0)
    source = next(part for part in parts if isinstance(part, SplitLogits))
    together = name in ("cat", "concat", "concatenate") and all(isinstance(part, SplitLogits) for part in parts)
    if together and dim % source.dim() < source.dim() - 1:
        return _like(torch.cat([part.as_subclass(Tensor) for part in parts], dim), source)
    raise _refused(name, source)


def _like(result: Any, source: SplitLogits) -> Any:
    """Return logits that are split as others are."""
    return split_logits(result.as_subclass(Tensor), source._sizes, source._tensor_group)  # noqa: SLF001 - our own


def _is_number(value: Any, source: SplitLogits) -> bool:
    return value is source or value is None or not isinstance(value, Tensor) or value.numel() == 1


def _leaves_last(index: Any, num_dims: int) -> bool:
    """Return whether an index takes the whole vocabulary."""
    parts = index if isinstance(index, tuple) else (index,)
    used = [part for part in parts if part is not None and part is not Ellipsis]
    consumed = sum(part.dim() if isinstance(part, Tensor) and part.dtype == torch.bool else 1 for part in used)
    if not used or parts[-1] is None:
        return not used and parts[-1] is Ellipsis
    reaches_last = consumed >= num_dims or (any(part is Ellipsis for part in parts) and parts[-1] is not Ellipsis)
    return not reaches_last or (isinstance(parts[-1], slice) and parts[-1] == slice(None))


def _cross_entropy(
    logits: SplitLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,  # noqa: FBT001 - torch's signature
    ignore_index: int = -100,
    reduce: bool | None = None,  # noqa: FBT001 - torch's signature
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    is_legacy = size_average is not None or reduce is not None
    if is_legacy or target.is_floating_point() or logits.dim() > 2 or (weight is not None and label_smoothing):
        return None  # probabilities, classes in the second of several dimensions, a weighted sum over the vocabulary
    if reduction not in ("none", "mean", "sum"):
        msg = f"`reduction={reduction!r}` is none of 'none', 'mean', 'sum'."
        raise ValueError(msg)
    if not 0.0 <= label_smoothing <= 1.0:
        msg = f"`label_smoothing={label_smoothing}` is not between 0 and 1."
        raise ValueError(msg)
    num_classes = sum(logits._sizes)  # noqa: SLF001 - our own
    if weight is not None and tuple(weight.shape) != (num_classes,):
        msg = f"`weight` has shape {tuple(weight.shape)}, but there are {num_classes} classes. Give each of them one."
        raise ValueError(msg)
    local, labels = logits.as_subclass(Tensor), target.reshape(-1)
    losses = vocabulary_cross_entropy(
        local.view(-1, local.shape[-1]),
        labels,
        logits.first(),
        logits._tensor_group,  # noqa: SLF001 - our own
        num_classes=num_classes,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    is_counted = labels != ignore_index
    counts = is_counted if weight is None else weight[labels.masked_fill(~is_counted, 0)] * is_counted
    if weight is not None:
        losses = losses * counts
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


def _argmax(logits: SplitLogits, dim: int | None = None, keepdim: bool = False) -> Tensor | None:  # noqa: FBT001, FBT002
    """Return the index of the largest logit in the whole vocabulary; the first, where there are several."""
    if dim not in (-1, logits.dim() - 1):
        return None
    values, indices = logits.as_subclass(Tensor).detach().max(-1, keepdim)
    group = logits._tensor_group  # noqa: SLF001 - our own
    best = values.float().clone()
    collectives.all_reduce(best, torch.distributed.ReduceOp.MAX, group.group).wait()
    found = torch.where(values == best, indices + logits.first(), torch.iinfo(torch.int64).max)
    collectives.all_reduce(found, torch.distributed.ReduceOp.MIN, group.group).wait()
    return found


def _refused(what: str, source: SplitLogits) -> ConfigError:
    sizes = source._sizes  # noqa: SLF001 - our own
    return ConfigError(
        f"`{what}` would see {sizes[source._tensor_group.rank]} of {sum(sizes)} logits, which `parallel_output=True` "  # noqa: SLF001
        "leaves split by vocabulary. Use `torch.nn.functional.cross_entropy(logits.view(-1, vocabulary), labels)` or "
        "the model's own loss, `logits.gather()` for the whole, or `parallel_output=False`."
    )


_ANSWERS: dict[str, Callable[..., Any]] = {
    "shape": _property,
    "size": _shape,
    "numel": _numel,
    "nelement": _numel,
    "view": _view,
    "reshape": _view,
    "flatten": _flatten,
    "__getitem__": _index,
    "cross_entropy": _cross_entropy,
    "argmax": _argmax,
}
"""Functions that need more than the part here, or leave the vocabulary alone in some cases."""
