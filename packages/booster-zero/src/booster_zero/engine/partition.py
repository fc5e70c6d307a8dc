"""Which part of a bucket each rank owns: formats of parameters, their places in a bucket, and what is sent of it.

Flat plans give every rank an equal slice of every bucket, wherever a parameter may be cut by that. Whole plans
give each parameter to one rank and make a bucket's slices as long as what their ranks own. Gradients are sent in as few
copies and messages as their sizes allow (`GradientPacker`).
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_runtime.sharding import ParameterPiece, is_cut, taken_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from booster_runtime.sharding import ShardingRanks


@dataclass(frozen=True, kw_only=True)
class Format:
    """The number formats of a parameter and the devices of its copies; parameters of one format share buckets.

    Args:
        working: Format that forward reads.
        master: Format that the optimizer updates.
        wire: Format in which gradients travel.
        device: Where forward runs.
        step_device: Where the optimizer steps, unless the memory that moves its state says otherwise.
        is_trained: Whether the parameter required a gradient when it was laid out.
        is_listed: Whether an optimizer listed it.
        copies: The stages of a pipeline that hold a copy of the parameter each; empty where one stage has it. Buckets
            of the same copies must be laid out alike on each of the stages.
        ranks: The ranks that share the parameter, where they are others than those of the layout.
        is_table: Whether the parameter is large, and forward looks up some of its rows: only these have gradients.
        optimizer: Which of the model's optimizers steps on the parameter.
        partition: How that takes it: ``"flat"`` or ``"parameter"``, see `booster_zero.engine.partition`.
        by_matrix: Whether that updates matrices by themselves, so that work goes by their products.
    """

    working: torch.dtype
    master: torch.dtype
    wire: torch.dtype
    device: torch.device
    step_device: torch.device
    is_trained: bool
    is_listed: bool = True
    copies: tuple[int, ...] = ()
    ranks: ShardingRanks | None = None
    is_table: bool = False
    optimizer: int = 0
    partition: str = "flat"
    by_matrix: bool = False

    @property
    def has_copy(self) -> bool:
        """Whether the optimizer updates a copy instead of the working values."""
        return self.working != self.master or self.device != self.step_device


@dataclass(eq=False)
class BucketPiece(ParameterPiece):
    """The part of one parameter that this rank owns.

    Attributes:
        begin: Where the piece begins in this rank's slice of the bucket.
    """

    begin: int


def is_elementwise(piece: BucketPiece, key: str, value: Any) -> bool:
    """Return whether a part of an optimizer's state belongs to a piece element by element."""
    return isinstance(value, torch.Tensor) and is_cut(key, value, piece.values.shape)


def cut_pieces(
    plan: BucketPlan, parameters: Sequence[nn.Parameter], rank: int, values: Tensor
) -> Iterator[BucketPiece]:
    """Yield the pieces that a rank owns of a bucket.

    Args:
        plan: The bucket's layout.
        parameters: Its parameters, in the order of the plan.
        rank: Among those that share the bucket.
        values: What the optimizer updates of it, shape ``(length of the rank's slice,)``.
    """
    for slot, parameter in zip(plan.slots, parameters, strict=True):
        owned = plan.owned(slot, rank)
        if owned is not None:
            begin = slot.offset + owned[0] - plan.bounds[rank]
            part = values[begin : begin + owned[1] - owned[0]]
            if part.numel() == slot.numel:
                part = part.view(parameter.shape)
            shown = taken_for(nn.Parameter(part, part.is_floating_point()), parameter)
            yield BucketPiece(slot.index, parameter, *owned, shown, begin)


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


_SMALL_NUMEL = 1 << 13
"""Gradients below this many elements travel together: a message costs more than a copy of them."""


class GradientPacker:
    """The gradients of one bucket, as they are sent.

    Gradients are given by parameter, flat and in the wire format; zero where there is none.

    Args:
        plan: The bucket's layout.
        format: Its formats and devices.
    """

    def __init__(self, plan: BucketPlan, format: Format) -> None:  # noqa: A002 - the noun for it
        self._wire, self._device = format.wire, format.device
        self._padding: dict[int, Tensor] = {}  # the few elements between parameters
        self._whole = _with_padding(plan.slots, plan.numel)
        runs = [
            list(run)
            for is_small, group in itertools.groupby(plan.slots, lambda slot: slot.numel < _SMALL_NUMEL)
            for run in ([group] if is_small else [[slot] for slot in group])
        ]
        ends = [plan.numel if run[-1] is plan.slots[-1] and len(runs) == 1 else 0 for run in runs]
        self._runs = [(run[0].offset, _with_padding(run, end)) for run, end in zip(runs, ends, strict=True)]

    def parts(self, gradients: Mapping[int, Tensor]) -> list[tuple[int, Tensor]]:
        """Return the bucket's gradient in parts: large ones as they are, runs of small ones joined."""
        return [(offset, self._joined(run, gradients)) for offset, run in self._runs]

    def joined(self, gradients: Mapping[int, Tensor]) -> Tensor:
        """Return the gradient in one tensor."""
        return self._joined(self._whole, gradients)

    def _joined(self, run: Sequence[tuple[int, int]], gradients: Mapping[int, Tensor]) -> Tensor:
        """Return neighbouring gradients and the padding between them in one tensor, which one call copies."""
        pieces = [gradients[index] if index in gradients else self._zeros(numel) for index, numel in run]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _zeros(self, numel: int) -> Tensor:
        kept = self._padding.get(numel)
        if kept is None:
            kept = torch.zeros(numel, dtype=self._wire, device=self._device)
            if numel < ALIGNMENT:
                self._padding[numel] = kept
        return kept


def _with_padding(slots: Sequence[Slot], end: int) -> list[tuple[int, int]]:
    """Return numbers and sizes of neighbouring parameters, and -1 and the size for what is between them and the end."""
    found, at = [], slots[0].offset
    for slot in slots:
        if slot.offset > at:
            found.append((-1, slot.offset - at))
        found.append((slot.index, slot.numel))
        at = slot.offset + slot.numel
    return [*found, (-1, end - at)] if end > at else found
