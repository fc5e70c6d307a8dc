"""Logits of which each rank has its part of the vocabulary: what is answered from the parts.

Reference: Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053), section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from booster_hybrid.split_logits import LogitsPartition, SplitLogits, meet
from booster_hybrid.tensor_parallel.collectives import gather_last
from booster_hybrid.tensor_parallel.loss import vocabulary_cross_entropy
from booster_hybrid.torch_functions import name_of
from booster_runtime import collectives

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from booster_hybrid.rank_group import RankGroup


class ByVocabulary(LogitsPartition):
    """Logits of shape ``(..., vocabulary)`` of which each rank has its part of the vocabulary.

    Args:
        sizes: Length of each rank's part.
        group: The tensor parallel ranks.

    Attributes:
        sizes: As above.
    """

    def __init__(self, sizes: Sequence[int], group: RankGroup) -> None:
        super().__init__(group)
        self.sizes = tuple(sizes)

    @property
    def first(self) -> int:
        """Index of the first local logit in the whole vocabulary."""
        return sum(self.sizes[: self.group.rank])

    @property
    def num_classes(self) -> int:
        """Length of the whole vocabulary."""
        return sum(self.sizes)

    def shape(self, local: torch.Size) -> torch.Size:
        """Return the shape of all logits, given that of a part."""
        return torch.Size((*local[:-1], self.num_classes))

    def gathered(self, local: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary.

        Collective: the tensor parallel ranks.
        """
        return gather_last(local, self.sizes, self.group)

    def shown(self) -> str:
        """Return what is here of what."""
        return f"{self.first}:{self.first + self.sizes[self.group.rank]} of {self.num_classes} logits"

    def answer(self, func: Callable[..., Any], source: SplitLogits, args: Sequence[Any], named: dict[str, Any]) -> Any:
        """Return what a function answers from the parts, if it leaves the vocabulary alone or is made for parts."""
        name, named = name_of(func), dict(named)
        if not any(isinstance(each, SplitLogits) for each in (*args, *named.values())):
            return _of_several(name, tuple(args), named, source)
        if named.get("input") is source:
            args = (named.pop("input"), *args)
        return _ANSWERS[name](source, *args[1:], **named) if name in _ANSWERS and args[0] is source else NotImplemented


def _partition(source: SplitLogits) -> ByVocabulary:
    assert isinstance(source.partition, ByVocabulary), "it answers"
    return source.partition


def _view(source: SplitLogits, *shape: Any, **_: Any) -> Any:
    if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        shape = tuple(shape[0])
    lead = Tensor.size(source)[:-1]
    if not shape or any(not isinstance(size, int) for size in shape):
        return NotImplemented
    if shape[-1] == _partition(source).num_classes or (
        shape[-1] == -1 and torch.Size(shape[:-1]).numel() == lead.numel()
    ):
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


def _gradient(source: SplitLogits, *_: Any) -> Any:
    """Return the gradient that was kept, for a getter, which gets the class too."""
    found = source.as_subclass(Tensor).grad
    return None if found is None else _like(found, source)


def _like(result: Any, source: SplitLogits) -> Any:
    """Return logits that are split as others are."""
    return source.alike(result.as_subclass(Tensor))


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
    num_classes = _partition(logits).num_classes
    if weight is not None and tuple(weight.shape) != (num_classes,):
        msg = f"`weight` has shape {tuple(weight.shape)}, but there are {num_classes} classes. Give each of them one."
        raise ValueError(msg)
    local, labels = logits.as_subclass(Tensor), target.reshape(-1)
    losses = vocabulary_cross_entropy(
        local.view(-1, local.shape[-1]),
        labels,
        _partition(logits).first,
        _partition(logits).group,
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
    meet("argmax", _partition(logits).group.group)
    values, indices = logits.as_subclass(Tensor).detach().max(-1, keepdim)
    group = _partition(logits).group
    wide = torch.promote_types(values.dtype, torch.float32)  # in which no two numbers of the logits' format are equal
    is_nan = values.isnan()
    own = torch.stack([is_nan.to(wide), values.to(wide).masked_fill(is_nan, torch.inf)])
    best = own.clone()
    collectives.all_reduce(best, torch.distributed.ReduceOp.MAX, group.group).wait()
    is_best = torch.where(best[0] > 0, is_nan, own[1] == best[1])
    found = torch.where(is_best, indices + _partition(logits).first, torch.iinfo(torch.int64).max)
    collectives.all_reduce(found, torch.distributed.ReduceOp.MIN, group.group).wait()
    return found


_ANSWERS: dict[str, Callable[..., Any]] = {
    "grad": _gradient,
    "view": _view,
    "reshape": _view,
    "flatten": _flatten,
    "__getitem__": _index,
    "cross_entropy": _cross_entropy,
    "argmax": _argmax,
}
"""Functions that need more than the part here, or leave the vocabulary alone in some cases."""
