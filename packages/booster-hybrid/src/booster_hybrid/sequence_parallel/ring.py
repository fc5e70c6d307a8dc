"""Keys and values on their way round a ring of ranks, and their gradients on their way home."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from booster_hybrid.sequence_parallel.kernels import sum_format

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from booster_hybrid.rank_group import RankGroup
    from booster_hybrid.sequence_parallel.layout import SequenceLayout
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
