"""Attention with keys and values that go round a ring of ranks: no rank ever has the whole sequence.

Each rank keeps its queries, sees one rank's keys and values after another, and adds up a softmax whose largest score
and sum it corrects as it goes. What comes next travels while this is computed. Backward takes the keys round again,
with the gradients of each rank's keys and values collected on the way home; scores are computed again from the sums
that forward kept, so that no rank ever holds more than a block of them.
References: Liu et al. 2023, "Ring Attention with Blockwise Transformers" (arXiv:2310.01889); Dao et al. 2022,
"FlashAttention" (arXiv:2205.14135), for the backward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from booster_runtime import collectives

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from booster_hybrid.sequence_parallel.layout import SequenceLayout
    from booster_hybrid.sequence_parallel.mask import Visibility
    from booster_hybrid.tensor_parallel.group import TensorGroup
    from booster_runtime.collectives import Pending


@dataclass(frozen=True)
class _Settings:
    """What both passes need in addition to tensors.

    Args:
        layout: How the queries' sequence is split.
        key_layout: How the keys' sequence is split.
        group: The ranks.
        visibility: Who may attend to whom.
        scaling: Multiplies the products.
        softcap: Bound of the scores, which a hyperbolic tangent keeps; ``None`` for none.
        dropout: Probability of dropping an attention weight.
        seed: What this rank's dropout is drawn from, again in backward.
    """

    layout: SequenceLayout
    key_layout: SequenceLayout
    group: TensorGroup
    visibility: Visibility
    scaling: float
    softcap: float | None
    dropout: float
    seed: int


@dataclass(frozen=True)
class _Block:
    """Queries and keys whose scores are computed at once.

    Args:
        queries: Which of this rank's queries.
        keys: Which of the visiting keys.
        positions: Where these are in their sequence.
        mask: Who may see whom; ``None`` where all may.
        number: Index of the block among all of this rank's.
    """

    queries: slice
    keys: slice
    positions: slice
    mask: Tensor | None
    number: int


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    layout: SequenceLayout,
    group: TensorGroup,
    *,
    key_layout: SequenceLayout | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return what this rank's queries find among the keys of all ranks.

    Args:
        query: Shape ``(batch, heads, local positions, size)``.
        key: Shape ``(batch, key/value heads, local positions, size)``; their heads divide those of the queries.
        value: Likewise; its size may be another.
        visibility: Who may attend to whom in the whole sequence.
        layout: How the sequence of the queries is split.
        group: The ranks.
        key_layout: How the sequence of the keys is split, where that is another one.
        bias: Added to the scores, shape ``(batch or 1, heads or 1, local positions, positions of all keys)``.
        sinks: One score for each head which takes weight and has no value, shape ``(heads,)``.
        softcap: Scores are kept below this by a hyperbolic tangent, before the bias and the mask.
        scaling: Multiplies the products; ``None`` for one over the root of the size.
        dropout: Probability of dropping an attention weight.

    Returns:
        Shape ``(batch, heads, local positions, value size)``; zeros for queries that see no key.

    Collective: the group, also in backward.
    """
    settings = _Settings(
        layout,
        layout if key_layout is None else key_layout,
        group,
        visibility,
        1.0 / math.sqrt(query.shape[-1]) if scaling is None else scaling,
        softcap,
        dropout,
        int(torch.randint(2**62, ())) if dropout else 0,
    )
    outputs: Tensor = _Ring.apply(query, key, value, bias, sinks, settings)  # type: ignore[no-untyped-call]
    return outputs


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        settings: _Settings,
    ) -> Tensor:
        work = _work_format(query)
        queries = query.to(work)
        largest = queries.new_full(query.shape[:-1], -math.inf)
        total = torch.zeros_like(largest)
        weighted = queries.new_zeros(*query.shape[:-1], value.shape[-1])
        for sender, keys, values in _visits(key, value, settings):
            keys, values = keys.to(work), values.to(work)  # noqa: PLW2901 - a block at a time
            for block in _blocks(sender, settings, query.device):
                scores, _ = _scores(queries, keys, bias, block, settings)
                rows = (slice(None), slice(None), block.queries)
                before = largest[rows]
                now = torch.maximum(before, scores.amax(-1))
                # Where nothing has been seen yet, any finite number will do.
                shift = now.masked_fill(now == -math.inf, 0.0)
                exponentials = scores.sub_(shift.unsqueeze(-1)).exp_()
                correction = (before - shift).exp_()
                total[rows] = total[rows] * correction + exponentials.sum(-1)
                kept = _dropped(exponentials, block, settings)
                found = _by_group(kept, values.shape[1]) @ values[:, :, block.keys]
                weighted[rows] = weighted[rows] * correction.unsqueeze(-1) + found.view(weighted[rows].shape)
                largest[rows] = now
        if sinks is not None:
            sink = sinks.to(work).view(1, -1, 1)
            now = torch.maximum(largest, sink)
            correction = (largest - now).exp_()
            total = total * correction + (sink - now).exp_()
            weighted *= correction.unsqueeze(-1)
            largest = now
        is_blind = total == 0
        outputs = weighted.div_(total.masked_fill(is_blind, 1.0).unsqueeze(-1))
        # A query that sees nothing gets weights exp(score - inf) = 0 in backward.
        normalizer = (largest + total.log()).masked_fill_(is_blind, math.inf)
        outputs = outputs.to(query.dtype)
        ctx.save_for_backward(query, key, value, bias, sinks, outputs, normalizer)
        ctx.settings = settings
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, sinks, outputs, normalizer = ctx.saved_tensors
        settings: _Settings = ctx.settings
        work = _work_format(query)
        queries, gradient = query.to(work), gradient.to(work)
        shared = (gradient * outputs.to(work)).sum(-1, keepdim=True)
        of_query = torch.zeros_like(queries)
        of_bias = torch.zeros_like(bias, dtype=work) if ctx.needs_input_grad[3] else None
        traveller = _Traveller(key, value, settings, work)
        for sender, keys, values in _visits(key, value, settings):
            keys, values = keys.to(work), values.to(work)  # noqa: PLW2901 - a block at a time
            of_keys, of_values = torch.zeros_like(keys), torch.zeros_like(values)
            for block in _blocks(sender, settings, query.device):
                rows = (slice(None), slice(None), block.queries)
                columns = (slice(None), slice(None), block.keys)
                scores, slope = _scores(queries, keys, bias, block, settings)
                weights = scores.sub_(normalizer[rows].unsqueeze(-1)).exp_()
                heads = keys.shape[1]
                incoming = _by_group(gradient[rows], heads)
                kept = _by_group(_dropped(weights, block, settings), heads)
                of_values[columns] += kept.transpose(-1, -2) @ incoming
                of_kept = (incoming @ values[columns].transpose(-1, -2)).view(weights.shape)
                of_weights = _dropped(of_kept, block, settings)
                of_logits = weights.mul_(of_weights.sub_(shared[rows]))
                if of_bias is not None:
                    where = (slice(None), slice(None), block.queries, block.positions)
                    of_bias[where] += of_logits.sum_to_size(of_bias[where].shape)
                if slope is not None:
                    of_logits = of_logits.mul_(slope)
                of_scores = _by_group(of_logits.mul_(settings.scaling), heads)
                of_query[rows] += (of_scores @ keys[columns]).view(of_query[rows].shape)
                of_keys[columns] += of_scores.transpose(-1, -2) @ _by_group(queries[rows], heads)
            traveller.add(sender, of_keys, of_values)
        of_key, of_value = traveller.home()
        of_sinks = None
        if sinks is not None:
            weights = (sinks.to(work).view(1, -1, 1) - normalizer).exp_()
            of_sinks = weights.mul_(shared.squeeze(-1)).sum((0, 2)).neg_().to(sinks.dtype)
        of_bias = None if of_bias is None else of_bias.to(bias.dtype)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), of_bias, of_sinks, None


class _Traveller:
    """Gradients of keys and values that visit every rank behind the keys, and come home with the sum.

    Args:
        key: This rank's keys.
        value: Its values.
        settings: What both passes need.
        work: Format of the sums.
    """

    def __init__(self, key: Tensor, value: Tensor, settings: _Settings, work: torch.dtype) -> None:
        self._key, self._value, self._settings, self._work = key, value, settings, work
        self._pending: tuple[Pending, Tensor] | None = None
        self._flat = key.new_empty(0)

    def add(self, owner: int, of_keys: Tensor, of_values: Tensor) -> None:
        """Add this rank's share to the gradients of a rank's keys and values, and send them on.

        Collective: the ring.
        """
        own = torch.cat([of_keys.flatten(), of_values.flatten()])
        if self._settings.group.size == 1:
            self._flat = own
            return
        if self._pending is not None:
            pending, collected = self._pending
            pending.wait()
            own += collected
        following = (owner - 1) % self._settings.group.size
        shape = (*self._key.shape[:2], self._settings.key_layout.lengths[following])
        numel = math.prod(shape) * (self._key.shape[-1] + self._value.shape[-1])
        self._pending = _pass_on(own, numel, self._settings.group)

    def home(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of this rank's own keys and values.

        Collective: none.
        """
        if self._pending is not None:
            pending, self._flat = self._pending
            pending.wait()
        return _unpacked(self._flat, self._key.shape, self._value.shape)


def _visits(key: Tensor, value: Tensor, settings: _Settings) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each rank's keys and values, this rank's own first, while the next ones are on their way."""
    group, layout = settings.group, settings.key_layout
    flat = torch.cat([key.flatten(), value.flatten()])
    for step in range(group.size):
        sender, following = (group.rank - step) % group.size, (group.rank - step - 1) % group.size
        length = layout.lengths[sender]
        shapes = [torch.Size((*each.shape[:2], length, each.shape[-1])) for each in (key, value)]
        pending = None
        if step + 1 < group.size:
            numel = key.shape[0] * key.shape[1] * layout.lengths[following] * (key.shape[-1] + value.shape[-1])
            pending = _pass_on(flat, numel, group)
        yield sender, *_unpacked(flat, *shapes)
        if pending is not None:
            pending[0].wait()
            flat = pending[1]


def _pass_on(flat: Tensor, numel: int, group: TensorGroup) -> tuple[Pending, Tensor]:
    """Start sending a tensor to the next rank, and receiving another from the one before."""
    out = flat.new_empty(numel)
    before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    sent = [0 if rank <= after else flat.numel() for rank in range(group.size + 1)]
    received = [0 if rank <= before else numel for rank in range(group.size + 1)]
    return collectives.all_to_all(flat, sent, out, received, group.group), out


def _unpacked(flat: Tensor, key_shape: torch.Size, value_shape: torch.Size) -> tuple[Tensor, Tensor]:
    numel = key_shape.numel()
    return flat[:numel].view(key_shape), flat[numel:].view(value_shape)


def _blocks(sender: int, settings: _Settings, device: torch.device) -> Iterator[_Block]:
    """Yield the pairs of chunks, one of this rank's and one of a visiting rank's, in which somebody sees somebody."""
    own, theirs = settings.layout.ranges[settings.group.rank], settings.key_layout.ranges[sender]
    number, row = 0, 0
    for first, last in own:
        column = 0
        for start, stop in theirs:
            number += 1
            if first < last and start < stop and settings.visibility.is_any((first, last), (start, stop)):
                yield _Block(
                    slice(row, row + last - first),
                    slice(column, column + stop - start),
                    slice(start, stop),
                    settings.visibility.mask((first, last), (start, stop), device),
                    sender * len(own) * len(theirs) + number,
                )
            column += stop - start
        row += last - first


def _scores(
    queries: Tensor, keys: Tensor, bias: Tensor | None, block: _Block, settings: _Settings
) -> tuple[Tensor, Tensor | None]:
    """Return the masked scores of a block, shape ``(batch, heads, queries, keys)``.

    The second are, where scores are capped, their derivatives by the products.
    """
    chosen, seen = queries[:, :, block.queries], keys[:, :, block.keys]
    scores = (_by_group(chosen, keys.shape[1]) @ seen.transpose(-1, -2)).view(*chosen.shape[:-1], seen.shape[2])
    scores = scores.mul_(settings.scaling)
    slope = None
    if settings.softcap is not None:
        bounded = scores.div_(settings.softcap).tanh_()
        slope = 1.0 - bounded.square()
        scores = bounded.mul_(settings.softcap)
    if bias is not None:
        scores.add_(bias[:, :, block.queries, block.positions])
    if block.mask is None:
        return scores, slope
    if block.mask.dtype == torch.bool:
        return scores.masked_fill_(~block.mask, -math.inf), slope
    return scores.add_(block.mask), slope


def _by_group(tensor: Tensor, num_key_value_heads: int) -> Tensor:
    """Stack the rows of the heads that share a key/value head: ``(batch, key/value heads, rows, columns)``."""
    return tensor.reshape(tensor.shape[0], num_key_value_heads, -1, tensor.shape[-1])


def _dropped(weights: Tensor, block: _Block, settings: _Settings) -> Tensor:
    """Return the weights of a block with some of them dropped, the same ones in both passes."""
    if not settings.dropout:
        return weights
    generator = torch.Generator(weights.device).manual_seed((settings.seed + block.number) % 2**62)
    kept = torch.rand(weights.shape, generator=generator, device=weights.device) >= settings.dropout
    return weights * kept / (1.0 - settings.dropout)


def _work_format(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
