"""Keys and values on their way round a ring of ranks, and their gradients on their way home.

A ring may consist of rings, of the ranks of one host each: keys go round the ring of the host, and between two such
rounds to the next host, whose ranks each have a ring with those of the same place on other hosts. What goes to the next
host then travels for a whole round, and not for the time of one step, as it does where one ring has all ranks.
Reference: Gu et al. 2024, "LoongTrain" (arXiv:2406.18485), section 4.3, where this is called double-ring attention.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from booster_hybrid.sequence_parallel.kernels import sum_format

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from booster_hybrid.rank_group import RankGroup
    from booster_hybrid.sequence_parallel.layout import SequenceLayout
    from booster_runtime.collectives import Pending


def visits(
    key: Tensor, value: Tensor, layout: SequenceLayout, rings: Sequence[RankGroup], first: int = 0
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each rank's keys and values, this rank's own first, while the next ones are on their way.

    Args:
        key: This rank's keys, shape ``(batch, heads, local positions, size)``.
        value: Its values.
        layout: How their sequence is split.
        rings: The rings, from the outermost to the innermost, whose ranks are neighbours.
        first: Where the ranks begin that are visited.

    Collective: the rings.
    """
    ring, *within = rings
    visited = _round(key, value, layout, _ranks(rings, first), ring)
    if not within:
        yield from visited
        return
    num_within = math.prod(each.size for each in within)
    for rank, keys, values in visited:
        yield from visits(keys, values, layout, within, rank - rank % num_within)


def _round(
    key: Tensor, value: Tensor, layout: SequenceLayout, ranks: Sequence[int], ring: RankGroup
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the keys and values of each rank of one ring, this rank's own first."""
    if ring.size == 1:
        yield ranks[0], key, value
        return
    held = [_packed(key, value)]
    for step in range(ring.size):
        sender, following = ranks[(ring.rank - step) % ring.size], ranks[(ring.rank - step - 1) % ring.size]
        pending = None
        if step + 1 < ring.size:
            pending = _pass_on(held[0], _numel(key, value, layout.lengths[following]), ring)
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

    In a ring a rank keeps its share of its own. The others' begin at the next rank, and take one hop less than the
    keys. What a round of an inner ring has summed is this rank's share in the ring around it.

    Args:
        key: This rank's keys.
        value: Its values.
        layout: How their sequence is split.
        rings: The rings, as `visits` has them.
    """

    def __init__(self, key: Tensor, value: Tensor, layout: SequenceLayout, rings: Sequence[RankGroup]) -> None:
        self._key, self._value, self._layout, self._rings = key, value, layout, rings
        self._rounds: list[_GradientRing | None] = [None] * len(rings)
        self._flat: Tensor | None = None

    def sums(self, owner: int) -> tuple[Tensor, Tensor]:
        """Return zeros to which this rank's share of the gradients of a rank's keys and values is added."""
        length = self._layout.lengths[owner]
        numel = _numel(self._key, self._value, length)
        self._flat = torch.zeros(numel, dtype=sum_format(self._key), device=self._key.device)
        return _unpacked(self._flat, self._key, self._value, length)

    def send(self, owner: int) -> None:
        """Send this rank's share towards its owner, together with what came from the rank before.

        Args:
            owner: The rank whose keys they are, as given to `sums`; owners come in the order of `visits`.

        Collective: the rings.
        """
        flat, self._flat = self._flat, None
        assert flat is not None, "what is sent has been summed"
        for depth in reversed(range(len(self._rings))):
            rings = self._rings[depth:]
            stride = math.prod(each.size for each in rings[1:])
            index = owner // stride % rings[0].size
            current = self._rounds[depth]
            if current is None:
                ranks = _ranks(rings, owner - owner % (stride * rings[0].size))
                numels = [_numel(self._key, self._value, self._layout.lengths[rank]) for rank in ranks]
                current = self._rounds[depth] = _GradientRing(numels, rings[0])
            current.send(index, flat)
            if not current.is_complete:
                return
            flat, self._rounds[depth] = current.collected(), None
        self._flat = flat

    def collected(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of this rank's own keys and values, after the last owner's were sent."""
        assert self._flat is not None, "each rank attends to its own keys"
        return _unpacked(self._flat, self._key, self._value, self._key.shape[2])


class _GradientRing:
    """Gradients on their way round one ring.

    Args:
        numels: How many elements each owner's gradients have.
        ring: The ranks.
    """

    def __init__(self, numels: Sequence[int], ring: RankGroup) -> None:
        self._numels, self._ring = numels, ring
        self._own: Tensor | None = None
        self._pending: tuple[Pending, Tensor] | None = None
        self._num_sent = 0

    @property
    def is_complete(self) -> bool:
        """Whether this rank's shares of all owners' gradients were sent."""
        return self._num_sent == self._ring.size

    def send(self, owner: int, flat: Tensor) -> None:
        """Send a share on; keep that of this rank's own.

        Collective: the ring, for other owners than this rank.
        """
        self._num_sent += 1
        if owner == self._ring.rank:
            self._own = flat
            return
        if self._pending is not None:
            pending, collected = self._pending
            pending.wait()
            flat += collected
        self._pending = _pass_on(flat, self._numels[(owner - 1) % self._ring.size], self._ring)

    def collected(self) -> Tensor:
        """Return the sum of all ranks' shares of this rank's own."""
        assert self._own is not None, "each rank attends to its own keys"
        if self._pending is not None:
            pending, flat = self._pending
            pending.wait()
            self._own += flat
        return self._own


def _ranks(rings: Sequence[RankGroup], first: int) -> list[int]:
    """Return the ranks of the outermost of some rings: those that have this rank's place in the others."""
    ring, *within = rings
    place, stride = 0, 1
    for each in reversed(within):
        place, stride = place + each.rank * stride, stride * each.size
    return [first + index * stride + place for index in range(ring.size)]


def _numel(key: Tensor, value: Tensor, length: int) -> int:
    """Return the number of elements of a rank's keys and values."""
    return math.prod(key.shape[:2]) * length * (key.shape[-1] + value.shape[-1])


def _pass_on(flat: Tensor, numel: int, ring: RankGroup) -> tuple[Pending, Tensor]:
    """Start sending a tensor to the next rank, and receiving another from the one before."""
    out = flat.new_empty(numel)
    before, after = (ring.rank - 1) % ring.size, (ring.rank + 1) % ring.size
    sent = [0 if rank <= after else flat.numel() for rank in range(ring.size + 1)]
    received = [0 if rank <= before else numel for rank in range(ring.size + 1)]
    return ring.all_to_all(flat, sent, out, received), out


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
