"""A vocabulary split over tensor parallel ranks: embedding, head, logits and their cross entropy.

An embedding looks up the tokens whose rows are here, and the results are summed. Logits of which each rank has a part
answer what can be answered from the parts; their cross entropy sends three numbers per token in one collective (the
largest logit, the sum of exponentials, the label's logit), and the whole logits never exist. Indices are checked
against the whole vocabulary, as each rank would take others' for known.

Reference: Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053), section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from booster_hybrid.split_logits import LogitsPartition, SplitLogits, meet
from booster_hybrid.tensor_parallel.collectives import gather_last, leave, refuse_second_derivative
from booster_hybrid.torch_functions import name_of, outside_of_graphs
from booster_runtime import collectives
from booster_runtime.memory import block_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from booster_hybrid.mesh import RankGroup


def within_bounds(indices: Tensor, num_rows: int, what: str) -> Tensor:
    """Return indices that are the same on every rank, after a check as torch's own embedding and cross entropy do it.

    On an accelerator nobody waits: as with torch's own, an assertion there ends the process.

    Args:
        indices: Any shape, integers.
        num_rows: Length of what they are indices of.
        what: What they are, for the message.

    Raises:
        IndexError: If one of them is out of bounds, on the CPU.
    """
    if torch.compiler.is_compiling():
        checked: Tensor = _within_bounds(indices, num_rows, what)
        return checked
    _check(indices, num_rows, what)
    return indices


# In a graph, what is checked is another tensor: a compiler leaves out what nobody reads.
@torch.library.custom_op("booster_hybrid::within_bounds", mutates_args=())
def _within_bounds(indices: torch.Tensor, num_rows: int, what: str) -> torch.Tensor:
    _check(indices, num_rows, what)
    return indices.clone()


@_within_bounds.register_fake
def _(indices: torch.Tensor, num_rows: int, what: str) -> torch.Tensor:
    del num_rows, what
    return torch.empty_like(indices)


def _check(indices: Tensor, num_rows: int, what: str) -> None:
    if not indices.numel():
        return
    if indices.device.type != "cpu":
        is_inside = ((indices >= 0) & (indices < num_rows)).all()
        torch._assert_async(is_inside, f"{what} out of bounds")  # noqa: SLF001 - no public name
        return
    low, high = (int(each) for each in torch.aminmax(indices))
    if low < 0 or high >= num_rows:
        worst = low if low < 0 else high
        msg = f"{what} {worst} is out of bounds: there are {num_rows}, numbered from 0. Correct the data."
        raise IndexError(msg)


class VocabularyForward:
    """The forward of an embedding that holds some rows.

    The embedding's own forward still runs, so that one which scales its results, as Gemma's does, keeps doing so.

    A token that is in nobody's rows raises, as it does in one process.

    Args:
        module: The embedding, with its local rows and its padding index among these.
        first: Index of the first local row in the whole table.
        num_rows: Rows of the whole table.
        group: The tensor parallel ranks.
    """

    def __init__(self, module: nn.Embedding, first: int, num_rows: int, group: RankGroup) -> None:
        self._module, self._first, self._num_rows, self._group = module, first, num_rows, group
        self._forward = module.forward

    def __call__(self, tokens: Tensor) -> Tensor:
        tokens = within_bounds(tokens, self._num_rows, "Token")
        return looked_up(tokens, self._first, self._module.num_embeddings, self._forward, self._group)


def looked_up(
    tokens: Tensor, first: int, num_rows: int, function: Callable[[Tensor], Tensor], group: RankGroup
) -> Tensor:
    """Return the rows of tokens, of which each rank has some.

    Args:
        tokens: Indices of the whole table, in any shape.
        first: Index of the first local row.
        num_rows: Number of local rows.
        function: Looks up local indices.
        group: The tensor parallel ranks.

    Collective: the group.
    """
    local = tokens - first
    is_elsewhere = (local < 0) | (local >= num_rows)
    rows = function(local.masked_fill(is_elsewhere, 0))
    return leave(rows.masked_fill(is_elsewhere.unsqueeze(-1), 0), group)


_BLOCK_BYTES, _DEVICE_BLOCK_BYTES = 1 << 20, 1 << 26
"""Tokens are worked on in blocks of about this size: what is made on the way stays in a CPU's cache, and is small."""


class _CrossEntropy(torch.autograd.Function):
    """Keeps the logits and two numbers per token; the softmax is recomputed in backward, block by block."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        is_counted: Tensor,
        vocabulary: ByVocabulary,
        spread: float,
    ) -> Tensor:
        num_classes = vocabulary.size
        dtype = torch.promote_types(logits.dtype, torch.float32)
        local = labels - vocabulary.first
        is_elsewhere = (local < 0) | (local >= logits.shape[-1])
        index = local.masked_fill_(is_elsewhere, 0).unsqueeze(-1)
        num_tokens = labels.numel()
        own = torch.empty((3, num_tokens), dtype=dtype, device=logits.device)
        for block in _blocks(logits):
            values = logits[block].to(dtype)
            # Where all logits are -inf, so would be their differences to it not be numbers.
            largest = values.amax(-1).clamp_(min=torch.finfo(dtype).min)
            own[0, block] = largest
            own[1, block] = (values - largest.unsqueeze(-1)).exp_().sum(-1)
            if spread:
                own[2, block] = values.sum(-1) * (spread / num_classes)
        of_label = logits.gather(-1, index).squeeze(-1).masked_fill(is_elsewhere, 0)
        own[2] = own[2].add_(of_label, alpha=1 - spread) if spread else of_label
        terms = vocabulary.gather(own)
        # Kept apart from the largest logit: added to a large one they would lose the small differences.
        largest = terms[:, 0].amax(0)
        normalizer = (terms[:, 1] * (terms[:, 0] - largest).exp_()).sum(0).log_()
        ctx.spread, ctx.num_classes = spread, num_classes
        ctx.save_for_backward(logits, largest, normalizer, index, is_elsewhere, is_counted)
        return (normalizer - (terms[:, 2].sum(0) - largest)).masked_fill(~is_counted, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        logits, largest, normalizer, index, is_elsewhere, is_counted = ctx.saved_tensors
        weight = gradient.masked_fill(~is_counted, 0).unsqueeze(-1)
        of_label = -weight.masked_fill(is_elsewhere.unsqueeze(-1), 0) * (1 - ctx.spread)
        of_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        for block in _blocks(logits):
            shifted = logits[block] - largest[block].unsqueeze(-1)
            softmax = shifted.sub_(normalizer[block].unsqueeze(-1)).exp_()
            if ctx.spread:
                softmax.sub_(ctx.spread / ctx.num_classes)
            softmax.mul_(weight[block]).scatter_add_(-1, index[block], of_label[block])
            of_logits[block] = softmax
        return of_logits, None, None, None, None


def _blocks(logits: Tensor) -> list[slice]:
    nbytes = block_bytes(logits.device, _BLOCK_BYTES, _DEVICE_BLOCK_BYTES)
    step = max(nbytes // (max(logits.shape[-1], 1) * 4), 1)
    return [slice(start, start + step) for start in range(0, logits.shape[0], step)]


@outside_of_graphs
def vocabulary_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    vocabulary: ByVocabulary,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return each token's cross entropy, the same on every rank; 0 for ignored tokens.

    Args:
        logits: Shape ``(tokens, local vocabulary)``.
        labels: Shape ``(tokens,)``, indices of the whole vocabulary.
        vocabulary: How the ranks share it.
        ignore_index: Label of tokens that don't count.
        label_smoothing: Share of each label that is spread evenly over the vocabulary.

    Raises:
        IndexError: If a label that counts is in nobody's part, on every rank; see `within_bounds`.

    Collective: the group.
    """
    is_counted = labels != ignore_index
    known = within_bounds(labels.masked_fill(~is_counted, 0), vocabulary.size, "Target")
    losses: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, known, is_counted, vocabulary, label_smoothing
    )
    return losses


class ByVocabulary(LogitsPartition):
    """Logits of shape ``(..., vocabulary)`` of which each rank has its part of the vocabulary.

    Args:
        sizes: Length of each rank's part.
        group: The tensor parallel ranks.

    Attributes:
        sizes: As above.
        size: Length of the whole vocabulary.
        first: Index of the first local logit in it.
        largest_size: Length of the longest part.
    """

    def __init__(self, sizes: Sequence[int], group: RankGroup) -> None:
        super().__init__(group)
        self.sizes = tuple(sizes)
        self.size, self.first, self.largest_size = sum(sizes), sum(sizes[: group.rank]), max(sizes)

    def check(self, labels: Tensor) -> None:
        """Raise for labels outside of the whole vocabulary; see `within_bounds`."""
        within_bounds(labels, self.size, "Target")

    def gather(self, terms: Tensor) -> Tensor:
        """Return the ranks' terms, one after the other along a new first dimension.

        Collective: the group.
        """
        ranks = self.group.size
        of_ranks = terms.new_empty((ranks, *terms.shape))
        of_ranks[self.group.rank] = terms
        self.group.all_gather(of_ranks.view(-1), [rank * terms.numel() for rank in range(ranks + 1)]).wait()
        return of_ranks

    def sum(self, tensor: Tensor) -> None:
        """Sum a tensor over the ranks, in place.

        Collective: the group.
        """
        self.group.all_reduce(tensor).wait()

    def shape(self, local: torch.Size) -> torch.Size:
        """Return the shape of all logits, given that of a part."""
        return torch.Size((*local[:-1], self.size))

    def gathered(self, local: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary.

        Collective: the tensor parallel ranks.
        """
        return gather_last(local, self.sizes, self.group)

    def shown(self) -> str:
        """Return what is here of what."""
        return f"{self.first}:{self.first + self.sizes[self.group.rank]} of {self.size} logits"

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
    if shape[-1] == _partition(source).size or (shape[-1] == -1 and torch.Size(shape[:-1]).numel() == lead.numel()):
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
    num_classes = _partition(logits).size
    if weight is not None and tuple(weight.shape) != (num_classes,):
        msg = f"`weight` has shape {tuple(weight.shape)}, but there are {num_classes} classes. Give each of them one."
        raise ValueError(msg)
    local, labels = logits.as_subclass(Tensor), target.reshape(-1)
    losses = vocabulary_cross_entropy(
        local.view(-1, local.shape[-1]),
        labels,
        _partition(logits),
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
