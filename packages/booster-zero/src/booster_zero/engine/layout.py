"""All buckets of one model, and moving everything when parameters are laid out in another order."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from booster_core.state import NamedTensors
from booster_runtime import collectives
from booster_runtime.sharding import State, is_cut, piece_shard
from booster_zero.engine.partition import assign_owners, plan_flat, plan_whole
from booster_zero.engine.states import Keep

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn

    from booster_core.state import ShardFollower, TensorShard
    from booster_runtime.sharding import ShardingRanks
    from booster_zero.engine.bucket import Bucket
    from booster_zero.engine.formats import BucketPiece, Format
    from booster_zero.engine.partition import BucketPlan


_COPIED_BYTES = 25 * 2**20
"""Size at which a bucket of parameters with copies on other stages takes no further one."""


class Layout:
    """The buckets of one model's parameters.

    Args:
        model: The user's model.
        ranks: The ranks that share the buckets, but for formats that name others.
        make: Makes a bucket of a plan, from the values that the parameters hold.
        bucket_bytes: Size at which a bucket takes no further parameter.

    Attributes:
        buckets: In the order in which they are reduced.
        parameters: Those of the model's parameters that are in buckets, by number.
        every: All of them.
        names: Their names in the user's model, by number.
        index_of: Their numbers, by ``id``.
        version: How often parameters have been laid out.
        followers: Keep values that are cut as what the optimizer updates, and go along when that is laid out again.
        ranks: As given.
        make: As given.
        bucket_bytes: As given.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: ShardingRanks,
        make: Callable[[BucketPlan, Mapping[int, nn.Parameter], Format, ShardingRanks], Bucket],
        *,
        bucket_bytes: int,
    ) -> None:
        self.buckets: list[Bucket] = []
        self.make = make
        name_of = NamedTensors.of(model).name_of
        self.every = dict(enumerate(model.parameters()))
        self.names = {index: name_of[id(parameter)] for index, parameter in self.every.items()}
        self.index_of = {id(parameter): index for index, parameter in self.every.items()}
        self.parameters: dict[int, nn.Parameter] = {}
        self.version = 0
        self.followers: list[weakref.ref[ShardFollower]] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._formats: dict[int, Format] = {}
        self._owners: dict[int, int] = {}
        self.ranks = ranks
        self.bucket_bytes = bucket_bytes

    def add_missing(self, parameters: Mapping[int, nn.Parameter], format_of: Callable[[nn.Parameter], Format]) -> None:
        """Put those parameters into buckets that are in none yet, in the order in which gradients are expected.

        Args:
            parameters: By number, which is the order of registration.
            format_of: Tells the formats of a parameter.

        Collective: none; every rank must add the same.
        """
        # Until the first backward has shown better, that is the reverse order of registration.
        expected = [index for index in sorted(parameters, reverse=True) if index not in self.parameters]
        formats = {index: format_of(parameters[index]) for index in expected}
        # What other stages hold too is laid out as it is there, where it is next to other parameters.
        for copies in sorted({format_.copies for format_ in formats.values()}):
            alike = [index for index in expected if formats[index].copies == copies]
            self.add({index: parameters[index] for index in alike}, {index: formats[index] for index in alike})

    def add(self, parameters: Mapping[int, nn.Parameter], formats: Mapping[int, Format]) -> None:
        """Put further parameters into buckets of their own, which come after those that are there.

        Args:
            parameters: By number, in the order in which their gradients are expected.
            formats: The format of each.

        Collective: none; every rank must add the same.
        """
        self.parameters.update(parameters)
        self._formats.update(formats)
        self._assign_owners()
        self._set_buckets([*self.buckets, *self._build(list(parameters))])

    def _set_buckets(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets
        self._bucket_of = {slot.index: bucket for bucket in buckets for slot in bucket.plan.slots}
        self.version += 1

    def _assign_owners(self) -> None:
        """Give an owner to each parameter that stays whole and has none."""
        sharing: dict[ShardingRanks, list[tuple[int, int]]] = defaultdict(list)
        for index, format_ in self._formats.items():
            if format_.partition == "parameter" and index not in self._owners:
                sharing[self.ranks_of(index)].append((index, self.parameters[index].numel()))
        for ranks, sizes in sharing.items():
            self._owners.update(assign_owners(sizes, ranks.shard_size))

    def take_formats(self, parameters: Mapping[int, nn.Parameter], format_of: Callable[[nn.Parameter], Format]) -> bool:
        """Take over the formats of parameters that are stepped on in another way from now on.

        Args:
            parameters: Parameters of the layout, by number.
            format_of: Tells the formats of a parameter.

        Returns:
            Whether there are any: all are to be laid out again then, by `rebuild`.

        Collective: none; every rank must pass the same.
        """
        found = {index: format_of(parameter) for index, parameter in parameters.items()}
        changed = {index: each for index, each in found.items() if _stepped(each) != _stepped(self._formats[index])}
        self._formats.update(changed)
        self._assign_owners()
        return bool(changed)

    @property
    def is_shared(self) -> bool:
        """Whether any bucket is shared: to a rank that shares nothing it is all the same when one is complete."""
        ranks = [self.ranks, *(bucket.ranks for bucket in self.buckets)]
        return any(each.shard_size > 1 or each.replica_group is not None for each in ranks)

    def ranks_of(self, index: int) -> ShardingRanks:
        """Return the ranks that share a parameter."""
        return self._formats[index].ranks or self.ranks

    def optimizer_of(self, index: int) -> int | None:
        """Return which of the model's optimizers steps on a parameter; ``None`` for one that is in no bucket."""
        format_ = self._formats.get(index)
        return None if format_ is None else format_.optimizer

    def order(self) -> list[int]:
        """Return all parameters in the order in which they are laid out."""
        return [slot.index for bucket in self.buckets for slot in bucket.plan.slots]

    def order_with_copies_last(self, first: Sequence[int]) -> list[int]:
        """Return all parameters: some first, then the others, then those with copies in an order that all stages know.

        Args:
            first: The parameters that come first if they have no copies.
        """
        every = self.order()
        copied = {index for index in every if self._formats[index].copies}
        begin = dict.fromkeys(index for index in first if index not in copied)
        rest = [index for index in every if index not in begin and index not in copied]
        return [*begin, *rest, *sorted(copied, reverse=True)]

    def note_used(self, used: Mapping[int, bool]) -> None:
        """Tell the buckets which parameters any rank used since gradients were dropped."""
        for bucket in self.buckets:
            bucket.note_used(used)

    def average_over_replicas(self) -> None:
        """Average gradients over the replicas of shards, but for those that have been since they were reduced.

        Collective: the shards' replicas.
        """
        for pending in [bucket.start_average() for bucket in self.buckets]:
            pending.wait()

    def whole_gradient(self, index: int, numel: int) -> Tensor:
        """Return a copy of a parameter's gradient, shape ``(numel,)``, from the ranks that hold its parts.

        Collective: the shard group.
        """
        bucket = self.bucket_of(index)
        whole = torch.zeros(numel, dtype=bucket.format.master, device=bucket.format.device)
        with bucket.in_use(changes=False):
            for piece in bucket.pieces:
                if piece.index == index and bucket.gradient is not None:
                    whole[piece.start : piece.stop] = bucket.slice_of(bucket.gradient, piece).flatten()
        collectives.all_reduce(whole, group=bucket.ranks.shard_group).wait()
        return whole

    def pieces(self) -> dict[int, BucketPiece]:
        """Return what this rank owns of each parameter of which it owns anything."""
        return {piece.index: piece for bucket in self.buckets for piece in bucket.pieces}

    def bucket_of(self, index: int) -> Bucket:
        """Return the bucket that holds a parameter."""
        return self._bucket_of[index]

    def rebuild(self, order: Sequence[int], states: Mapping[int, State]) -> dict[int, State]:
        """Lay all parameters out again, and move values, gradients and optimizer state to their new owners.

        Args:
            order: All parameters, in the order in which their gradients came.
            states: The optimizer's state of each piece that this rank owns.

        Returns:
            The optimizer's state of each piece that this rank owns now.

        An old bucket frees the parameters' memory as soon as all of them have moved. On top of the rest of the old
        buckets, and the new ones, at most one bucket's worth of memory is needed.

        Collective: the shard group.
        """
        old, old_pieces = self.buckets, self.pieces()
        self._set_buckets(self._build(order, old))
        new_pieces = self.pieces()
        whole = {slot.index for bucket in old if bucket.format.partition == "parameter" for slot in bucket.plan.slots}
        cut = {index: state for index, state in states.items() if index not in whole}
        kinds, moved = self._described_states(old_pieces, new_pieces, cut)
        moved.update((index, state) for index, state in states.items() if index in whole)  # owners stay
        for bucket in old:
            with bucket.in_use(changes=False):
                if bucket.moves_values:
                    self._move(
                        bucket,
                        bucket.values,
                        lambda piece, part: piece.values.data.copy_(part),
                        new_pieces,
                    )
                self._move_followers(bucket, new_pieces)
                if bucket.has_gradient and bucket.gradient is not None:
                    for slot in bucket.plan.slots:
                        self._bucket_of[slot.index].take_gradient_state(bucket)
                    self._move(
                        bucket,
                        bucket.gradient,
                        lambda piece, part: self._bucket_of[piece.index].gradient_of(piece).copy_(part),
                        new_pieces,
                    )
                if bucket.format.partition == "flat":
                    self._move_states(bucket, new_pieces, states, kinds, moved)
                elif bucket.memory.moves:
                    _carry_states(bucket, self._bucket_of, moved)
            bucket.free()
        for bucket in self.buckets:
            if bucket.format.partition == "parameter":
                bucket.keep_state(moved)
        return moved

    def _build(self, order: Sequence[int], left: Sequence[Bucket] = ()) -> list[Bucket]:
        """Make buckets of parameters, which may come from others."""
        by_format: dict[Format, list[tuple[int, int]]] = defaultdict(list)
        for index in order:
            by_format[self._formats[index]].append((index, self.parameters[index].numel()))
        place = {index: position for position, index in enumerate(order)}
        plans = []
        for format_, sizes in by_format.items():
            size = (format_.ranks or self.ranks).shard_size
            # Copies are laid out alike at places whose other parameters may ask for buckets of other sizes.
            bucket_bytes = _COPIED_BYTES if format_.copies else self.bucket_bytes
            most = max(bucket_bytes // format_.wire.itemsize, 1)
            is_flat = format_.partition == "flat"
            made = plan_flat(sizes, size, most) if is_flat else plan_whole(sizes, self._owners, size, most)
            plans += [(max(place[slot.index] for slot in plan.slots), format_, plan) for plan in made]
        left_bucket_of = {slot.index: bucket for bucket in left for slot in bucket.plan.slots}
        staying = {bucket: len(bucket.plan.slots) for bucket in left}
        buckets = []
        # A bucket is reduced when its last gradient has come.
        for _, format_, plan in sorted(plans, key=lambda item: item[0]):
            buckets.append(self.make(plan, self.parameters, format_, format_.ranks or self.ranks))
            for bucket in (left_bucket_of[slot.index] for slot in plan.slots if slot.index in left_bucket_of):
                staying[bucket] -= 1
                if not staying[bucket]:
                    bucket.free_whole()
        return buckets

    def _move(
        self,
        bucket: Bucket,
        own: Tensor,
        write: Callable[[BucketPiece, Tensor], object],
        pieces: Mapping[int, BucketPiece],
    ) -> None:
        """Gather a tensor that is cut as a bucket, and write what belongs to this rank's new pieces."""
        plan, rank = bucket.plan, bucket.ranks.shard_rank
        whole = torch.zeros(plan.numel, dtype=own.dtype, device=bucket.format.device)
        whole[plan.bounds[rank] : plan.bounds[rank + 1]] = own
        collectives.all_gather(whole, plan.bounds, bucket.ranks.shard_group).wait()
        for slot in plan.slots:
            piece = pieces.get(slot.index)
            if piece is not None:
                part = whole[slot.offset + piece.start : slot.offset + piece.stop]
                with self._bucket_of[slot.index].in_use(changes=True):
                    write(piece, part.view(piece.values.shape))

    def _move_followers(self, bucket: Bucket, pieces: Mapping[int, BucketPiece]) -> None:
        """Move what followers keep of a bucket, unless they keep it whole on every rank, as the parameters are."""
        if bucket.keep is Keep.ALWAYS and not bucket.has_masters:
            return
        dtype = bucket.values.dtype
        wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype

        def shard_of(piece: BucketPiece, values: Tensor) -> TensorShard:
            return piece_shard(self.names[piece.index], None, piece, values, is_owner=True)

        for follower in filter(None, [each() for each in self.followers]):
            own = torch.zeros(bucket.numel, dtype=wide, device=bucket.format.device)
            for piece in bucket.pieces:
                follower.give(shard_of(piece, bucket.slice_of(own, piece)))
            self._move(
                bucket,
                own,
                lambda piece, part, take=follower.take: take(  # type: ignore[misc]
                    shard_of(piece, part.to(piece.values.device))
                ),
                pieces,
            )

    def _described_states(
        self, old_pieces: Mapping[int, BucketPiece], new_pieces: Mapping[int, BucketPiece], states: Mapping[int, State]
    ) -> tuple[dict[int, dict[str, torch.dtype]], dict[int, State]]:
        """Return, of the states of all ranks that share them, what is cut and how, and the rest for the new pieces."""
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
        all_kinds: dict[int, dict[str, torch.dtype]] = {}
        moved: dict[int, State] = {}
        # Ranks that don't share a parameter may hold another one under its number, such as other experts.
        for ranks in dict.fromkeys(map(self.ranks_of, self.parameters)):
            own = {index: (kinds[index], others[index]) for index in kinds if self.ranks_of(index) == ranks}
            for of_rank in collectives.all_gather_object(own, ranks.shard_group):
                for index, (found, state) in of_rank.items():
                    all_kinds[index] = found
                    if index in new_pieces:
                        moved[index] = dict(state)
        return all_kinds, moved

    def _move_states(
        self,
        bucket: Bucket,
        new_pieces: Mapping[int, BucketPiece],
        states: Mapping[int, State],
        kinds: Mapping[int, Mapping[str, torch.dtype]],
        moved: dict[int, State],
    ) -> None:
        """Move the elementwise state of a bucket's parameters."""
        present = [slot.index for slot in bucket.plan.slots if slot.index in kinds]
        for key in sorted({key for index in present for key in kinds[index]}):
            dtypes = {kinds[index][key] for index in present if key in kinds[index]}
            for dtype in sorted(dtypes, key=str):
                own = torch.zeros(bucket.numel, dtype=dtype, device=bucket.format.step_device)
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
                    lambda piece, part, key=key: moved[piece.index].__setitem__(  # type: ignore[misc]
                        key, part.to(piece.values.device, copy=True)
                    ),
                    having,
                )


def _stepped(format_: Format) -> tuple[object, ...]:
    """Return what a format says of how its parameters are stepped on."""
    return format_.master, format_.optimizer, format_.partition


def _carry_states(bucket: Bucket, bucket_of: Mapping[int, Bucket], moved: dict[int, State]) -> None:
    """Copy the optimizer's state out of a bucket, whose blocks are dropped next, into the buckets that take its place.

    Args:
        bucket: The bucket, whose blocks are in use.
        bucket_of: The new bucket of each parameter.
        moved: The state of each piece; what is the bucket's is replaced by a copy.
    """
    carried: dict[Bucket, dict[int, State]] = defaultdict(dict)
    for piece in bucket.pieces:
        if piece.index in moved:
            state = {
                key: each.clone() if isinstance(each, torch.Tensor) else each
                for key, each in moved[piece.index].items()
            }
            moved[piece.index] = carried[bucket_of[piece.index]][piece.index] = state
    for bucket_now, states in carried.items():
        bucket_now.keep_state(states)
