"""`SplitLogits`: logits of which each rank has its part of the vocabulary, and nobody the whole.

They look whole: their shape is that of all logits, and cross entropy over them is that of all. What needs more than the
part that is here gets the whole, which the ranks put together then; what would change a copy of it in place raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError
from booster_hybrid.tensor_parallel.collectives import gather_last
from booster_hybrid.tensor_parallel.loss import vocabulary_cross_entropy
from booster_hybrid.whole import (
    FACTS,
    Kept,
    asks_format,
    changes_in_place,
    check_unchanged,
    is_elementwise,
    meet,
    name_of,
    on_whole,
    whole_of,
)
from booster_runtime import collectives

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed import ProcessGroup

    from booster_hybrid.rank_group import RankGroup

_GATHERED = "logits that are split by vocabulary"


class SplitLogits(Tensor):
    """This rank's part of logits of shape ``(..., vocabulary)``, made by `split_logits`.

    Cross entropy, ``argmax(-1)``, conversions, products with numbers, and views and indices that leave the vocabulary
    alone work on the parts. Every other function is called on the whole logits, as plain tensors with gradients, which
    are put together when the first one asks: all tensor parallel ranks must call it. What would write into them raises.
    `local` is the part here, `gather` puts the whole together.

    Reference: Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053), section 3.
    """

    _sizes: tuple[int, ...]
    _tensor_group: RankGroup
    _kept: Kept | None = None

    def local(self) -> Tensor:
        """Return the part that is here, shape ``(..., local vocabulary)``, as a plain tensor."""
        return self.as_subclass(Tensor)

    def first(self) -> int:
        """Return the index of the first local logit in the whole vocabulary."""
        return sum(self._sizes[: self._tensor_group.rank])

    def gather(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the whole logits as a plain tensor; with arguments, what `torch.Tensor.gather` picks of them.

        Collective: the tensor parallel ranks.
        """
        if args or kwargs:
            picked: Tensor = on_whole(Tensor.gather, (self, *args), kwargs, SplitLogits, self._group(), _whole)
            return picked
        return _whole(self)

    def alike(self, local: Tensor) -> Tensor:
        """Return other logits as split by vocabulary as these are."""
        return split_logits(local, self._sizes, self._tensor_group)

    def _group(self) -> ProcessGroup | None:
        return self._tensor_group.group

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
        """Answer for the whole logits: from the part where that can be, else from the whole."""
        del types
        args, named = tuple(args), dict(kwargs or {})
        found: list[SplitLogits] = [each for each in pytree.tree_leaves((args, named)) if isinstance(each, SplitLogits)]
        with DisableTorchFunctionSubclass():
            for each in found:
                check_unchanged(each._kept, _GATHERED)  # noqa: SLF001 - our own, as below
            answer = _answer(func, args, dict(named), found[0])
        if answer is not NotImplemented:
            return answer
        if changes_in_place(func, args, named, SplitLogits):
            raise _refused(name_of(func), found[0])
        return on_whole(func, args, named, SplitLogits, found[0]._group(), _whole)  # noqa: SLF001


def split_logits(local: Tensor, sizes: Sequence[int], group: RankGroup) -> Tensor:
    """Return a part of logits that answers for the whole.

    Args:
        local: Shape ``(..., sizes[rank])``.
        sizes: Length of each rank's part of the vocabulary.
        group: The tensor parallel ranks.
    """
    with DisableTorchFunctionSubclass():
        logits = local.as_subclass(SplitLogits)
    logits._sizes, logits._tensor_group = tuple(sizes), group  # noqa: SLF001 - made here
    return logits


def _whole(source: SplitLogits) -> Tensor:
    """Return the whole logits, which are put together once for all that asks for them."""
    local = source.local()
    kept = whole_of(source._kept, local, lambda: gather_last(local, source._sizes, source._tensor_group))  # noqa: SLF001
    source._kept = kept  # noqa: SLF001 - our own
    return kept.tensor


def _answer(func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any], source: SplitLogits) -> Any:
    """Return what a function answers on the parts, ``NotImplemented`` where it needs the whole."""
    name = name_of(func)
    if not any(isinstance(each, SplitLogits) for each in (*args, *named.values())):
        return _of_several(name, args, named, source)
    if name in FACTS or asks_format(name, args, SplitLogits):
        return func(*args, **named)
    if is_elementwise(name, args, named, source) and getattr(func, "__name__", "") != "__set__":
        return _like(func(*args, **named), source)
    if named.get("input") is source:
        args = (named.pop("input"), *args)
    return _ANSWERS[name](source, *args[1:], **named) if name in _ANSWERS and args[0] is source else NotImplemented


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
        return NotImplemented
    if shape[-1] == sum(source._sizes) or (shape[-1] == -1 and torch.Size(shape[:-1]).numel() == lead.numel()):  # noqa: SLF001
        return _like(Tensor.reshape(source, (*shape[:-1], Tensor.size(source, -1))), source)
    return NotImplemented


def _flatten(source: SplitLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    is_apart = end_dim % source.dim() < source.dim() - 1
    return _like(Tensor.flatten(source, start_dim, end_dim), source) if is_apart else NotImplemented


def _index(source: SplitLogits, index: Any) -> Any:
    return _like(Tensor.__getitem__(source, index), source) if _leaves_last(index, source.dim()) else NotImplemented


def _of_several(name: str, args: tuple[Any, ...], named: dict[str, Any], source: SplitLogits) -> Any:
    """Put logits of several batches after each other."""
    parts: Any = args[0] if args else named.get("tensors")
    dim = args[1] if len(args) > 1 else named.get("dim", 0)
    together = name in ("cat", "concat", "concatenate") and "out" not in named
    if together and all(isinstance(part, SplitLogits) for part in parts) and dim % source.dim() < source.dim() - 1:
        return _like(torch.cat([part.as_subclass(Tensor) for part in parts], dim), source)
    return NotImplemented


def _length(source: SplitLogits) -> int:
    return _shape(source)[0]  # type: ignore[index]


def _gradient(source: SplitLogits, *_: Any) -> Any:
    """Return the gradient that was kept, for a getter, which gets the class too."""
    found = source.as_subclass(Tensor).grad
    return None if found is None else _like(found, source)


def _like(result: Any, source: SplitLogits) -> Any:
    """Return logits that are split as others are."""
    return split_logits(result.as_subclass(Tensor), source._sizes, source._tensor_group)  # noqa: SLF001 - our own


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
) -> Any:
    is_legacy = size_average is not None or reduce is not None
    if is_legacy or target.is_floating_point() or logits.dim() > 2 or (weight is not None and label_smoothing):
        # Probabilities, classes in the second of several dimensions, a weighted sum over the vocabulary.
        return NotImplemented
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


def _argmax(logits: SplitLogits, dim: int | None = None, keepdim: bool = False) -> Any:  # noqa: FBT001, FBT002
    """Return the index of the largest logit in the whole vocabulary; the first, where there are several.

    As for torch, NaN is larger than any number.
    """
    if dim not in (-1, logits.dim() - 1):
        return NotImplemented
    meet("argmax", logits._tensor_group.group)  # noqa: SLF001 - our own
    values, indices = logits.as_subclass(Tensor).detach().max(-1, keepdim)
    group = logits._tensor_group  # noqa: SLF001 - our own
    wide = torch.promote_types(values.dtype, torch.float32)  # in which no two numbers of the logits' format are equal
    is_nan = values.isnan()
    own = torch.stack([is_nan.to(wide), values.to(wide).masked_fill(is_nan, torch.inf)])
    best = own.clone()
    collectives.all_reduce(best, torch.distributed.ReduceOp.MAX, group.group).wait()
    is_best = torch.where(best[0] > 0, is_nan, own[1] == best[1])
    found = torch.where(is_best, indices + logits.first(), torch.iinfo(torch.int64).max)
    collectives.all_reduce(found, torch.distributed.ReduceOp.MIN, group.group).wait()
    return found


def _refused(what: str, source: SplitLogits) -> ConfigError:
    sizes = source._sizes  # noqa: SLF001 - our own
    return ConfigError(
        f"`{what}` would write into {sizes[source._tensor_group.rank]} of {sum(sizes)} logits, which "  # noqa: SLF001
        "`parallel_output=True` leaves split by vocabulary. Write into `logits.gather()`, the whole, or pass "
        "`parallel_output=False`."
    )


_ANSWERS: dict[str, Callable[..., Any]] = {
    "shape": _property,
    "size": _shape,
    "grad": _gradient,
    "__len__": _length,
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
