"""All buckets of one model: which there are, what lies where, and moving everything when they are laid out anew."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from booster_runtime import collectives
from booster_runtime.sharding import State, is_cut
from booster_zero.engine.partition import assign_owners, plan_flat, plan_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn

    from booster_runtime.sharding import ShardingRanks
    from booster_zero.engine.bucket import Format, Piece, ShardedBucket
    from booster_zero.engine.partition import BucketPlan


_COPIED_BYTES = 25 * 2**20
"""Size at which a bucket of parameters that are copied elsewhere takes no further one."""

BucketT = TypeVar("BucketT", bound="ShardedBucket")


class Layout(Generic[BucketT]):
    """The buckets of one model's parameters.

    Args:
        ranks: The ranks that share the buckets.
        make: Makes a bucket of a plan, from the values that the parameters hold.
        kind: ``"flat"`` or ``"parameter"``, see `booster_zero.engine.partition`.
        bucket_bytes: Size at which a bucket takes no further parameter.

    Attributes:
        buckets: In the order in which they are reduced.
        kind: As given.
        parameters: The model's parameters by number.
    """

    def __init__(
        self,
        ranks: ShardingRanks,
        make: Callable[[BucketPlan, Mapping[int, nn.Parameter], Format, ShardingRanks], BucketT],
        *,
        kind: str,
        bucket_bytes: int,
    ) -> None:
        self.buckets: list[BucketT] = []
        self._make = make
        self.parameters: dict[int, nn.Parameter] = {}
        self._formats: dict[int, Format] = {}
        self._owners: dict[int, int] = {}
        self._ranks = ranks
        self.kind = kind
        self._bucket_bytes = bucket_bytes

    def add(self, parameters: Mapping[int, nn.Parameter], formats: Mapping[int, Format]) -> None:
        """Put further parameters into buckets of their own, which come after those that are there.

        Args:
            parameters: By number, in the order in which their gradients are expected.
            formats: The format of each.

        Collective: none; every rank must add the same.
        """
        self.parameters.update(parameters)
        self._formats.update(formats)
        sizes = [(index, parameter.numel()) for index, parameter in parameters.items()]
        self._owners.update(assign_owners(sizes, self._ranks.shard_size))
        self.buckets += self._build(list(parameters))

    def pieces(self) -> dict[int, Piece]:
        """Return what this rank owns of each parameter of which it owns anything."""
        return {piece.index: piece for bucket in self.buckets for piece in bucket.pieces}

    def bucket_of(self, index: int) -> BucketT:
        """Return the bucket in which a parameter lies."""
        return next(bucket for bucket in self.buckets for slot in bucket.plan.slots if slot.index == index)

    def format_of(self, index: int) -> Format:
        """Return the format of a parameter."""
        return self._formats[index]

    def rebuild(self, order: Sequence[int], states: Mapping[int, State]) -> dict[int, State]:
        """Lay all parameters out anew, and move values, gradients and optimizer state to their new owners.

        Args:
            order: All parameters, in the order in which their gradients came.
            states: The optimizer's state of each piece that this rank owns.

        Returns:
            The optimizer's state of each piece that this rank owns now.

        An old bucket lets go of the parameters' memory as soon as all of them have moved. Besides the rest of the old
        buckets, and the new ones, at most one bucket's worth of memory is needed.

        Collective: the shard group.
        """
        old, old_pieces = self.buckets, self.pieces()
        self.buckets = self._build(order, old)
        new_pieces = self.pieces()
        homes = {slot.index: bucket for bucket in self.buckets for slot in bucket.plan.slots}
        kinds, moved = self._described_states(old_pieces, new_pieces, states)
        if self.kind == "parameter":  # owners stay; memory may be another
            moved = dict(states)
        for bucket in old:
            with bucket.at_hand(changes=False):
                if bucket.moves_values:
                    self._move(
                        bucket, bucket.values, lambda piece, part: piece.values.data.copy_(part), new_pieces, homes
                    )
                if bucket.has_gradient and bucket.gradient is not None:
                    for slot in bucket.plan.slots:
                        homes[slot.index].make_gradient()
                    self._move(
                        bucket,
                        bucket.gradient,
                        lambda piece, part: homes[piece.index].gradient_of(piece).copy_(part),
                        new_pieces,
                        homes,
                    )
                if self.kind == "flat":
                    self._move_states(bucket, new_pieces, states, kinds, homes, moved)
            bucket.gradient = None
            bucket.leave()
        if self.kind == "parameter":
            for bucket in self.buckets:
                bucket.house(moved)
        return moved

    def _build(self, order: Sequence[int], left: Sequence[BucketT] = ()) -> list[BucketT]:
        """Make buckets of parameters, which may come from others."""
        by_format: dict[Format, list[tuple[int, int]]] = defaultdict(list)
        for index in order:
            by_format[self._formats[index]].append((index, self.parameters[index].numel()))
        size = self._ranks.shard_size
        place = {index: position for position, index in enumerate(order)}
        plans = []
        for format_, sizes in by_format.items():
            # Copies are laid out alike at places whose other parameters may ask for buckets of other sizes.
            bucket_bytes = _COPIED_BYTES if format_.copies else self._bucket_bytes
            most = max(bucket_bytes // format_.wire.itemsize, 1)
            made = plan_flat(sizes, size, most) if self.kind == "flat" else plan_whole(sizes, self._owners, size, most)
            plans += [(max(place[slot.index] for slot in plan.slots), format_, plan) for plan in made]
        homes = {slot.index: bucket for bucket in left for slot in bucket.plan.slots}
        staying = {bucket: len(bucket.plan.slots) for bucket in left}
        buckets = []
        # A bucket can leave when its last gradient has come.
        for _, format_, plan in sorted(plans, key=lambda item: item[0]):
            buckets.append(self._make(plan, self.parameters, format_, self._ranks))
            for bucket in (homes[slot.index] for slot in plan.slots if slot.index in homes):
                staying[bucket] -= 1
                if not staying[bucket]:
                    bucket.vacate()
        return buckets

    def _move(
        self,
        bucket: BucketT,
        own: Tensor,
        write: Callable[[Piece, Tensor], object],
        pieces: Mapping[int, Piece],
        homes: Mapping[int, BucketT],
    ) -> None:
        """Gather a tensor that is cut as a bucket, and write what belongs to this rank's new pieces."""
        plan, rank = bucket.plan, self._ranks.shard_rank
        whole = torch.zeros(plan.numel, dtype=own.dtype, device=bucket.format.device)
        whole[plan.bounds[rank] : plan.bounds[rank + 1]] = own
        collectives.all_gather(whole, plan.bounds, self._ranks.shard_group).wait()
        for slot in plan.slots:
            piece = pieces.get(slot.index)
            if piece is not None:
                part = whole[slot.offset + piece.start : slot.offset + piece.stop]
                with homes[slot.index].at_hand(changes=True):
                    write(piece, part.view(piece.values.shape))

    def _described_states(
        self, old_pieces: Mapping[int, Piece], new_pieces: Mapping[int, Piece], states: Mapping[int, State]
    ) -> tuple[dict[int, dict[str, torch.dtype]], dict[int, State]]:
        """Return, of every rank's states, what is cut and in which format, and the rest for this rank's new pieces."""
        # What is elementwise moves by slices; the rest is small, and equal on every rank that has a part.
        kinds: dict[int, dict[str, torch.dtype]] = {}
        others: dict[int, State] = {}
        for index, state in states.items():
            shape = old_pieces[index].values.shape
            cut = {
                key: value.dtype
                for key, value in state.items()
                if isinstance(value, torch.Tensor) and is_cut(key, value, shape)
            }
            kinds[index] = cut
            others[index] = {key: value for key, value in state.items() if key not in cut}
        gathered = collectives.all_gather_object((kinds, others), self._ranks.shard_group)
        kinds = {index: found for of_rank, _ in gathered for index, found in of_rank.items()}
        moved = {
            index: dict(state) for _, of_rank in gathered for index, state in of_rank.items() if index in new_pieces
        }
        return kinds, moved

    def _move_states(
        self,
        bucket: BucketT,
        new_pieces: Mapping[int, Piece],
        states: Mapping[int, State],
        kinds: Mapping[int, Mapping[str, torch.dtype]],
        homes: Mapping[int, BucketT],
        moved: dict[int, State],
    ) -> None:
        """Move the elementwise state of a bucket's parameters."""
        present = [slot.index for slot in bucket.plan.slots if slot.index in kinds]
        for key in sorted({key for index in present for key in kinds[index]}):
            dtypes = {kinds[index][key] for index in present if key in kinds[index]}
            for dtype in sorted(dtypes, key=str):
                own = torch.zeros(bucket.share_numel, dtype=dtype, device=bucket.format.home)
                for piece in bucket.pieces:
                    if kinds.get(piece.index, {}).get(key) == dtype:
                        bucket.slice_of(own, piece).copy_(states[piece.index][key])
                having = {
                    index: new_pieces[index]
                    for index in present
                    if kinds[index].get(key) == dtype and index in new_pieces
                }
                self._move(
                    bucket,
                    own,
                    lambda piece, part, key=key: moved[piece.index].__setitem__(
                        key, homes[piece.index].state_room(piece, key, part.dtype).copy_(part)
                    ),  # type: ignore[misc]
                    having,
                    homes,
                )
