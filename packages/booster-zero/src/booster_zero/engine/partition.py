"""The place of each parameter in a bucket, and which part of it each rank owns: pure arithmetic on numbers.

Flat plans give every rank an equal slice of every bucket, wherever a parameter may be cut by that. Whole plans
give each parameter to one rank and make a bucket's slices as long as what their ranks own.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ALIGNMENT = 16
"""Parameters begin at multiples of this many elements: 64 bytes in fp32, as vector kernels like it."""
_MOST_BYTES, _LEAST_BYTES, _BUCKETS = 25 * 2**20, 2**20, 8
"""Sizes of buckets where the user names none, and how many a small model has whose gradients are split."""
_LEAST_SLICE_BYTES = 2**18
"""What each rank has of a bucket at least, where there are so many ranks that messages would be small otherwise: below
some 100 KiB a network's latency takes as long as the bytes."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The place of one parameter in a bucket.

    Args:
        index: Number of the parameter.
        offset: Its first element in the bucket.
        numel: Number of its elements; may be 0.
    """

    index: int
    offset: int
    numel: int


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """The layout of one bucket.

    Args:
        slots: The parameters, by offset.
        bounds: Where the ranks' slices begin and end: rank ``r`` owns ``[bounds[r], bounds[r + 1])``. A ``range`` where
            slices are equal, so that a plan for thousands of ranks is as small as one for two.
    """

    slots: tuple[Slot, ...]
    bounds: Sequence[int]

    @property
    def numel(self) -> int:
        """Number of elements, padding included."""
        return self.bounds[-1]

    def owned(self, slot: Slot, rank: int) -> tuple[int, int] | None:
        """Return the range of a parameter's own elements that a rank owns, or ``None`` where it owns none.

        A parameter without elements has one owner as well, so that its state is kept somewhere: the rank in
        whose slice it would begin.

        Args:
            slot: The parameter's place.
            rank: A rank of those that share the bucket.
        """
        low, high = self.bounds[rank], self.bounds[rank + 1]
        if slot.numel == 0:
            is_last = rank == len(self.bounds) - 2
            return (0, 0) if low <= slot.offset < high or (is_last and slot.offset >= high) else None
        start, stop = max(slot.offset, low), min(slot.offset + slot.numel, high)
        return (start - slot.offset, stop - slot.offset) if start < stop else None


def default_bucket_bytes(gradient_bytes: int, shard_size: int, *, stage: int) -> int:
    """Return the size in bytes of a model's buckets where the user names none.

    Args:
        gradient_bytes: What all its gradients take as they travel, in bytes.
        shard_size: Ranks that share each bucket.
        stage: Of ZeRO. In stage 1 larger buckets are fewer messages, and there is nothing to save.
    """
    part = gradient_bytes // _BUCKETS
    most = max(_MOST_BYTES, min(_LEAST_SLICE_BYTES * shard_size, part))
    return most if stage == 1 else min(most, max(part, _LEAST_BYTES))


def plan_flat(sizes: Sequence[tuple[int, int]], world_size: int, bucket_numel: int) -> list[BucketPlan]:
    """Put parameters into buckets that are cut into equal slices.

    Args:
        sizes: Number and element count of each parameter, in the order in which they are laid out.
        world_size: Ranks that share each bucket.
        bucket_numel: A bucket takes no further parameter beyond this many elements; a larger one has its own.
    """
    plans = []
    for members in _fill(sizes, bucket_numel):
        slots, end = _lay_out(members, 0)
        plans.append(BucketPlan(slots=slots, bounds=_even_bounds(_share(end, world_size), world_size)))
    return plans


def plan_whole(
    sizes: Sequence[tuple[int, int]], owners: Mapping[int, int], world_size: int, bucket_numel: int
) -> list[BucketPlan]:
    """Put parameters into buckets whose slices end where parameters end.

    Args:
        sizes: As for `plan_flat`.
        owners: The rank that owns each parameter, by its number.
        world_size: Ranks that share each bucket.
        bucket_numel: As for `plan_flat`.
    """
    plans = []
    for members in _fill(sizes, bucket_numel):
        slots: list[Slot] = []
        bounds = [0]
        of_rank: dict[int, list[tuple[int, int]]] = {}
        for member in members:
            of_rank.setdefault(owners[member[0]], []).append(member)
        for rank in range(world_size):
            own, end = _lay_out(of_rank.get(rank, ()), bounds[-1])
            slots += own
            bounds.append(end)
        plans.append(BucketPlan(slots=tuple(slots), bounds=tuple(bounds)))
    return plans


def assign_owners(
    sizes: Sequence[tuple[int, int]], world_size: int, held: Sequence[int] | None = None
) -> dict[int, int]:
    """Return an owner for each parameter such that ranks own about equally much.

    The largest parameter that is left goes to the rank that has least, which is within 4/3 of the best
    possible (Graham 1969, "Bounds on multiprocessing timing anomalies").

    Args:
        sizes: Number of each parameter, and its size: elements, or what its update costs.
        world_size: Number of ranks.
        held: What the ranks own already; nothing by default.
    """
    loads = [(load, rank) for rank, load in enumerate(held or [0] * world_size)]
    heapq.heapify(loads)
    owners = {}
    for index, numel in sorted(sizes, key=lambda item: (-item[1], item[0])):
        load, rank = loads[0]
        owners[index] = rank
        heapq.heapreplace(loads, (load + max(numel, 1), rank))
    return owners


def _fill(sizes: Sequence[tuple[int, int]], bucket_numel: int) -> list[list[tuple[int, int]]]:
    buckets: list[list[tuple[int, int]]] = []
    held = 0
    for index, numel in sizes:
        if not buckets or held + numel > bucket_numel:
            buckets.append([])
            held = 0
        buckets[-1].append((index, numel))
        held += _aligned(numel)
    return buckets


def _lay_out(members: Sequence[tuple[int, int]], start: int) -> tuple[tuple[Slot, ...], int]:
    slots, offset = [], start
    for index, numel in members:
        slots.append(Slot(index=index, offset=offset, numel=numel))
        offset += _aligned(numel)
    return tuple(slots), offset


def _share(numel: int, world_size: int) -> int:
    """Return the length of an equal slice, padding included."""
    return _aligned(-(-numel // world_size))


def _even_bounds(share: int, world_size: int) -> Sequence[int]:
    # A range has no step of 0.
    return range(0, share * world_size + 1, share) if share else (0,) * (world_size + 1)


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT
