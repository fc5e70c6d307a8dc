"""Attention with keys and values that go round a ring of ranks: no rank ever has the whole sequence.

Each rank keeps its queries and sees one rank's keys and values after another. A kernel computes what the queries find
among those, and the logarithm of each sum of exponentials, by which the parts are merged in fp32. What comes next
travels while this is computed. Backward takes the keys round again, and collects the gradients of each rank's keys and
values on their way home; the kernel is given the merged outputs and logarithms, so that no scores are kept.
Reference: Liu et al. 2023, "Ring Attention with Blockwise Transformers" (arXiv:2310.01889). Merging by the logarithms
is also what torch's context parallelism does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from booster_hybrid.sequence_parallel.flex_kernel import FlexKernel, takes_rules
from booster_hybrid.sequence_parallel.kernels import (
    ExplicitScores,
    FusedKernel,
    MergedOutputs,
    can_fuse,
    sink_gradient,
    sum_format,
)
from booster_hybrid.sequence_parallel.mask import find_blocks, whole_block

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from booster_hybrid.mesh import RankGroup
    from booster_hybrid.sequence_parallel.exchange import SequenceLayout
    from booster_hybrid.sequence_parallel.mask import Block, Visibility
    from booster_runtime.collectives import Pending


def visits(
    key: Tensor, value: Tensor, layout: SequenceLayout, group: RankGroup
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each rank's keys and values, this rank's own first, while the next ones are on their way.

    Args:
        key: This rank's keys, shape ``(batch, heads, local positions, size)``.
        value: Its values.
        layout: How their sequence is split.
        group: The ranks.

    Collective: the group.
    """
    if group.size == 1:
        yield 0, key, value
        return
    held = [_packed(key, value)]
    for step in range(group.size):
        sender, following = (group.rank - step) % group.size, (group.rank - step - 1) % group.size
        pending = None
        if step + 1 < group.size:
            pending = _pass_on(held[0], _numel(key, value, layout.lengths[following]), group)
        if step == 0:
            yield sender, key, value
        elif pending is not None:
            yield sender, *_unpacked(held[0], key, value, layout.lengths[sender])
        else:  # nothing keeps the last ones but their user
            yield sender, *_unpacked(held.pop(), key, value, layout.lengths[sender])
        if pending is not None:
            pending[0].wait()
            held[0] = pending[1]
            pending = None


class GradientRing:
    """Gradients of keys and values, which visit the ranks that attend to these and come home with the sum.

    A rank keeps its share of its own. The others' begin at the next rank, and take one hop less than the keys.

    Args:
        key: This rank's keys.
        value: Its values.
        layout: How their sequence is split.
        group: The ranks.
    """

    def __init__(self, key: Tensor, value: Tensor, layout: SequenceLayout, group: RankGroup) -> None:
        self._key, self._value, self._layout, self._group = key, value, layout, group
        self._flat, self._own = key, key
        self._pending: tuple[Pending, Tensor] | None = None

    def sums(self, owner: int) -> tuple[Tensor, Tensor]:
        """Return zeros to which this rank's share of the gradients of a rank's keys and values is added."""
        length = self._layout.lengths[owner]
        numel = _numel(self._key, self._value, length)
        self._flat = torch.zeros(numel, dtype=sum_format(self._key), device=self._key.device)
        return _unpacked(self._flat, self._key, self._value, length)

    def send(self, owner: int) -> None:
        """Send what `sums` gave towards its owner, with what came from the rank before; keep this rank's own.

        Args:
            owner: The rank whose keys they are; owners come in the order of `visits`.

        Collective: the group, for other owners than this rank.
        """
        flat, self._flat = self._flat, self._key
        if owner == self._group.rank:
            self._own = flat
            return
        self._add_arrived(flat)
        numel = _numel(self._key, self._value, self._layout.lengths[(owner - 1) % self._group.size])
        self._pending = _pass_on(flat, numel, self._group)

    def collected(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of this rank's own keys and values, after the last owner's were sent."""
        self._add_arrived(self._own)
        return _unpacked(self._own, self._key, self._value, self._key.shape[2])

    def _add_arrived(self, flat: Tensor) -> None:
        if self._pending is not None:
            pending, arrived = self._pending
            pending.wait()
            flat += arrived


def _numel(key: Tensor, value: Tensor, length: int) -> int:
    """Return the number of elements of a rank's keys and values."""
    return math.prod(key.shape[:2]) * length * (key.shape[-1] + value.shape[-1])


def _pass_on(flat: Tensor, numel: int, group: RankGroup) -> tuple[Pending, Tensor]:
    """Start sending a tensor to the next rank, and receiving another from the one before."""
    out = flat.new_empty(numel)
    before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    sent = [0 if rank <= after else flat.numel() for rank in range(group.size + 1)]
    received = [0 if rank <= before else numel for rank in range(group.size + 1)]
    return group.all_to_all(flat, sent, out, received), out


def _packed(key: Tensor, value: Tensor) -> Tensor:
    """Return a copy of keys and values for the way."""
    flat = key.new_empty(key.numel() + value.numel())
    keys, values = _unpacked(flat, key, value, key.shape[2])
    keys.copy_(key)
    values.copy_(value)
    return flat


def _unpacked(flat: Tensor, key: Tensor, value: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return keys and values, or their gradients, of a rank with some number of positions."""
    shapes = [torch.Size((*each.shape[:2], length, each.shape[-1])) for each in (key, value)]
    numel = shapes[0].numel()
    return flat[:numel].view(shapes[0]), flat[numel:].view(shapes[1])


_MOST_BLOCKS = 1 << 20
"""More blocks than a rank's queries and another rank's keys have. Seeds are made of it, and of a seed, the CPU's
generator reads 32 bits: this leaves 12 of them for the ranks."""


@dataclass(frozen=True)
class AttentionCall:
    """What attention is asked for, besides queries, keys and values.

    Args:
        visibility: Who may attend to whom in the whole sequence.
        layout: How the sequence of the queries is split.
        group: The ranks; one alone may have the whole sequence.
        key_layout: How the sequence of the keys is split, where that is another one.
        bias: Added to the scores, shape ``(batch or 1, heads or 1, local positions, positions of all keys)``; where
            heads are exchanged, of this rank's heads and of all positions.
        sinks: One score for each head which takes weight and has no value, shape ``(heads,)``.
        softcap: Scores are kept below this by a hyperbolic tangent, before the bias and the mask.
        scaling: Multiplies the products; ``None`` for one over the root of the size.
        dropout: Probability of dropping an attention weight.
    """

    visibility: Visibility
    layout: SequenceLayout
    group: RankGroup
    key_layout: SequenceLayout | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    softcap: float | None = None
    scaling: float | None = None
    dropout: float = 0.0

    @property
    def layouts(self) -> tuple[SequenceLayout, SequenceLayout]:
        """How the sequences of queries and of keys are split."""
        return self.layout, self.layout if self.key_layout is None else self.key_layout


class _Settings:
    """What both passes need in addition to tensors: the call, and the kernel that computes a block."""

    def __init__(self, call: AttentionCall, kernel: FusedKernel | ExplicitScores | FlexKernel) -> None:
        self.visibility, self.group, self.kernel = call.visibility, call.group, kernel
        self.layout, self.key_layout = call.layouts

    def blocks(self, sender: int, bias: Tensor | None) -> Iterator[Block]:
        """Yield the blocks of this rank's queries and a rank's keys, the same ones in both passes."""
        own, theirs = self._ranges(sender)
        if isinstance(self.kernel, FlexKernel):
            return whole_block(own, theirs, sender * _MOST_BLOCKS)
        is_cut = self.kernel.is_cut or bias is not None
        return find_blocks(own, theirs, self.visibility, first_number=sender * _MOST_BLOCKS, is_cut=is_cut)

    def _ranges(self, sender: int) -> tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]]:
        """Return where this rank's queries and a rank's keys are in their sequences."""
        return self.layout.ranges[self.group.rank], self.key_layout.ranges[sender]

    def mask(self, block: Block, bias: Tensor | None, device: torch.device) -> Any:
        """Return what may be seen in a block, or what is added to its scores."""
        if isinstance(self.kernel, FlexKernel):
            return self.visibility.block_mask(*self._ranges(block.number // _MOST_BLOCKS), device)
        mask = self.visibility.mask(block.query_range, block.key_range, device) if block.kind == "some" else None
        if mask is not None:
            mask = mask[block.samples]  # of one for all samples, all
        if bias is None:
            return mask
        part = bias[block.samples] if bias.shape[0] > 1 else bias
        part = part[:, :, block.queries, slice(*block.key_range)]
        if block.kind == "causal":
            rows, columns = part.shape[-2:]
            mask = torch.ones(rows, columns, dtype=torch.bool, device=device).tril_()
        if mask is None:
            return part
        return part.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else part + mask


def ring_attention(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
    """Return what this rank's queries find among the keys of all ranks.

    Args:
        query: Shape ``(batch, heads, local positions, size)``.
        key: Shape ``(batch, key/value heads, local positions, size)``; their heads divide those of the queries.
        value: Likewise; its size may be another.
        call: What is asked for.

    Returns:
        Shape ``(batch, heads, local positions, value size)``; zeros for queries that see no key.

    Collective: the group, also in backward.
    """
    scaling = 1.0 / math.sqrt(query.shape[-1]) if call.scaling is None else call.scaling
    trains_bias = call.bias is not None and call.bias.requires_grad
    kernel: FusedKernel | ExplicitScores | FlexKernel
    is_ruled = call.visibility.has_rule and call.bias is None and not call.dropout and call.softcap is None
    if is_ruled and takes_rules(query, value):
        kernel = FlexKernel(scaling)
    elif can_fuse(query, dropout=call.dropout, softcap=call.softcap, needs_bias_gradient=trains_bias):
        kernel = FusedKernel(scaling)
    else:
        seed = int(torch.randint(2**62, ())) if call.dropout else 0
        kernel = ExplicitScores(scaling, call.softcap, call.dropout, seed, trains_bias)
    settings = _Settings(call, kernel)
    with torch.autocast(query.device.type, enabled=False):  # kernels are given formats on purpose
        if isinstance(kernel, FlexKernel) and call.group.size == 1:
            return _at_once(query, key, value, call.sinks, settings)
        outputs: Tensor = _Ring.apply(query, key, value, call.bias, call.sinks, settings)  # type: ignore[no-untyped-call]
    return outputs


def _at_once(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, settings: _Settings) -> Tensor:
    """Return what queries find among all keys, by one call whose backward is its own."""
    assert isinstance(settings.kernel, FlexKernel), "other kernels' backward takes what was merged"
    (block,) = settings.blocks(0, None)
    outputs, logarithms = settings.kernel.attend(query, key, value, settings.mask(block, None, query.device))
    if sinks is None:
        return outputs
    return (outputs * (logarithms - sinks.view(1, -1, 1)).sigmoid().unsqueeze(-1)).to(query.dtype)


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
        merged = MergedOutputs(query, value.shape[-1])
        for sender, keys, values in visits(key, value, settings.key_layout, settings.group):
            for block in settings.blocks(sender, bias):
                rows, columns = _places(block)
                mask = settings.mask(block, bias, query.device)
                merged.add(rows, *settings.kernel.forward(query[rows], keys[columns], values[columns], mask, block))
            del keys, values
        outputs, logarithms = merged.result(sinks)
        ctx.save_for_backward(query, key, value, bias, sinks, outputs, logarithms)
        ctx.settings = settings
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, sinks, outputs, logarithms = ctx.saved_tensors
        settings: _Settings = ctx.settings
        of_query = torch.zeros_like(query, dtype=sum_format(query))
        of_bias = torch.zeros_like(bias, dtype=sum_format(query)) if ctx.needs_input_grad[3] else None
        home = GradientRing(key, value, settings.key_layout, settings.group)
        for sender, keys, values in visits(key, value, settings.key_layout, settings.group):
            of_keys, of_values = home.sums(sender)
            for block in settings.blocks(sender, bias):
                rows, columns = _places(block)
                mask = settings.mask(block, bias, query.device)
                # fmt: off
                of_parts = settings.kernel.backward(
                    gradient[rows], query[rows], keys[columns], values[columns], outputs[rows], logarithms[rows],
                    mask, block,
                )
                # fmt: on
                of_query[rows] += of_parts[0]
                of_keys[columns] += of_parts[1]
                of_values[columns] += of_parts[2]
                if of_bias is not None:
                    of_added = of_parts[3]
                    assert of_added is not None, "only explicit scores train a bias"
                    samples = block.samples if of_bias.shape[0] > 1 else slice(None)
                    where = (samples, slice(None), block.queries, slice(*block.key_range))
                    of_bias[where] += of_added.sum_to_size(of_bias[where].shape)
                    del of_added
                del of_parts
            del keys, values, of_keys, of_values
            home.send(sender)
        of_key, of_value = home.collected()
        of_sinks = None if sinks is None else sink_gradient(sinks, gradient, outputs, logarithms)
        of_bias = None if of_bias is None else of_bias.to(bias.dtype)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), of_bias, of_sinks, None


def _places(block: Block) -> tuple[tuple[slice, slice, slice], tuple[slice, slice, slice]]:
    """Return where a block's queries and keys are."""
    return (block.samples, slice(None), block.queries), (block.samples, slice(None), block.keys)
