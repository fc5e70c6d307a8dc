"""All buckets of one model, with those of parameters that are listed only later, and which optimizer lists which."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from booster_core.state import NamedTensors
from booster_runtime import collectives
from booster_runtime.sharding import is_by_matrix, partition_for, piece_shard, step_cost
from booster_zero.engine.partition import assign_owners, plan_flat, plan_whole
from booster_zero.engine.states import Keep

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from booster_core.state import ShardFollower, TensorShard
    from booster_runtime.sharding import ShardingRanks
    from booster_zero.engine.bucket import Bucket
    from booster_zero.engine.partition import BucketPiece, BucketPlan, Format

    _Sharing = tuple[ShardingRanks, bool, tuple[int, ...]]


class ListedParameters:
    """The parameters that the groups of a model's optimizers list.

    Args:
        optimizers: The user's optimizers, whose groups list the model's parameters still.
        partition: How parameters are to be cut, see `ShardingOptions`.

    Attributes:
        partitions: How each of the optimizers takes parameters: ``"flat"`` or ``"parameter"``.
        by_matrix: Whether each of them updates matrices by themselves.

    Raises:
        ConfigError: If one of the optimizers can't be sharded.
    """

    def __init__(self, optimizers: Sequence[Optimizer], partition: str) -> None:
        # Parameters that no optimizer lists go with those of the first.
        self.partitions = [partition_for(each, partition) for each in optimizers] or ["flat"]
        self.by_matrix = [is_by_matrix(each) for each in optimizers] or [False]
        self._number_of: dict[int, int] = {}
        for number, each in enumerate(optimizers):
            for group in each.param_groups:
                self.add(group["params"], number)

    def add(self, parameters: Iterable[Tensor], number: int) -> None:
        """Count parameters as those of the optimizer with a number."""
        self._number_of.update((id(parameter), number) for parameter in parameters)

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._number_of

    def number_of(self, parameter: Tensor) -> int:
        """Return which optimizer steps on a parameter."""
        return self._number_of.get(id(parameter), 0)


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
        bucket_by_index: The bucket of each.
        every: All of them.
        names: Their names in the user's model, by number.
        index_of: Their numbers, by ``id``.
        followers: Keep values that are cut as what the optimizer updates, and go along when parameters change buckets.
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
        self.alike: dict[str, nn.Parameter] = {}  # of all ranks, as spread experts are not
        self.followers: list[weakref.ref[ShardFollower]] = []
        self.bucket_by_index: dict[int, Bucket] = {}
        self._holding: dict[tuple[int, ...], list[Bucket]] = {}
        self._formats: dict[int, Format] = {}
        self._owners: dict[int, int] = {}
        # What each rank of a group has to do in a step, for optimizers whose work is counted alike. Copies on other
        # stages count by themselves: their owners are the same there, where other parameters are.
        self._loads: dict[_Sharing, list[int]] = {}
        self.ranks = ranks
        self.bucket_bytes = bucket_bytes

    def add_missing(self, parameters: Mapping[int, nn.Parameter], format_of: Callable[[nn.Parameter], Format]) -> None:
        """Put those parameters into buckets that are in none yet, in the order in which gradients are expected.

        Args:
            parameters: By number, which is the order of registration.
            format_of: Tells the formats of a parameter.

        Collective: none; every rank must add the same.
        """
        # The reverse order of registration; the first backward shows in which order buckets are complete.
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
        self.alike.update(
            {self.names[index]: parameters[index] for index in parameters if formats[index].ranks is None}
        )
        self._formats.update(formats)
        self._assign_owners()
        self._set_buckets([*self.buckets, *self._build(list(parameters))])

    def _set_buckets(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets
        self.bucket_by_index = {slot.index: bucket for bucket in buckets for slot in bucket.plan.slots}
        self._holding = {}

    def _assign_owners(self) -> None:
        """Give an owner to each parameter that stays whole and has none, where ranks have least to do already."""
        sharing: dict[_Sharing, list[tuple[int, int]]] = defaultdict(list)
        for index, format_ in self._formats.items():
            if format_.partition == "parameter" and index not in self._owners:
                cost = step_cost(self.parameters[index], by_matrix=format_.by_matrix)
                sharing[self.ranks_of(index), format_.by_matrix, format_.copies].append((index, cost))
        for key, costs in sharing.items():
            loads = self._loads.setdefault(key, [0] * key[0].shard_size)
            owners = assign_owners(costs, len(loads), loads)
            self._owners.update(owners)
            for index, cost in costs:
                loads[owners[index]] += max(cost, 1)

    def ranks_of(self, index: int) -> ShardingRanks:
        """Return the ranks that share a parameter."""
        return self._formats[index].ranks or self.ranks

    def optimizer_of(self, index: int) -> int | None:
        """Return which of the model's optimizers steps on a parameter; ``None`` for one that is in no bucket."""
        format_ = self._formats.get(index)
        return None if format_ is None else format_.optimizer

    def is_listed(self, index: int) -> bool:
        """Return whether an optimizer lists a parameter of the layout, as far as the layout was told."""
        return self._formats[index].is_listed

    def order(self) -> list[int]:
        """Return all parameters in the order in which they are laid out."""
        return [slot.index for bucket in self.buckets for slot in bucket.plan.slots]

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
        return self.bucket_by_index[index]

    def buckets_of(self, indices: tuple[int, ...]) -> list[Bucket]:
        """Return the buckets that hold some parameters, each once."""
        if indices not in self._holding:
            self._holding[indices] = list(dict.fromkeys(self.bucket_by_index[index] for index in indices))
        return self._holding[indices]

    def regroup(self, parameters: Mapping[int, nn.Parameter], format_of: Callable[[nn.Parameter], Format]) -> None:
        """Give parameters that an optimizer lists only now new buckets, with the formats that it needs.

        Args:
            parameters: By number. They share buckets with others that no optimizer lists, which get new ones, too; no
                optimizer has state of any.
            format_of: Tells the formats of a parameter.

        Collective: the shard groups of these buckets. Every rank must pass the same.
        """
        left = {self.bucket_by_index[index] for index in parameters}
        self._formats.update((index, format_of(parameter)) for index, parameter in parameters.items())
        self._assign_owners()
        buckets: list[Bucket] = []
        for bucket in self.buckets:
            buckets += self._replace(bucket) if bucket in left else [bucket]
        self._set_buckets(buckets)

    def _replace(self, bucket: Bucket) -> list[Bucket]:
        """Move what a bucket has to new ones, one for each format that its parameters have now, and return these."""
        stays = bucket.keep is Keep.ALWAYS
        with bucket.in_use(changes=stays):
            if stays:  # the script may have written to parameters since the last step adopted that
                bucket.take_working_values()
            values = self._gathered(bucket, bucket.values)
            has_gradient = bucket.has_gradient and bucket.gradient is not None
            gradient = self._gathered(bucket, bucket.make_gradient()) if has_gradient else None
        # On every rank whole, as the parameters are, it stays where it is.
        is_whole = stays and not bucket.has_masters
        followers = [] if is_whole else [each for each in (found() for found in self.followers) if each is not None]
        followed = [self._gathered(bucket, self._given(bucket, each)) for each in followers]
        bucket.free()
        offset_of = {slot.index: slot.offset for slot in bucket.plan.slots}

        def part(whole: Tensor, piece: BucketPiece) -> Tensor:
            begin = offset_of[piece.index]
            return whole[begin + piece.start : begin + piece.stop].view(piece.values.shape)

        made = self._build([*offset_of])
        for new in made:
            if gradient is not None:
                new.take_gradient_state(bucket)
            with new.in_use(changes=True):
                for piece in new.pieces:
                    piece.values.data.copy_(part(values, piece))
                    if gradient is not None:
                        new.gradient_of(piece).copy_(part(gradient, piece))
                    for follower, whole in zip(followers, followed, strict=True):
                        follower.take(self._followed_shard(piece, part(whole, piece).to(piece.values.device)))
            new.round_values().wait()
        return made

    def _build(self, order: Sequence[int]) -> list[Bucket]:
        """Make buckets of parameters, in the order in which the last gradients of each are expected."""
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
        return [
            self.make(plan, self.parameters, format_, format_.ranks or self.ranks)
            for _, format_, plan in sorted(plans, key=lambda item: item[0])
        ]

    def _gathered(self, bucket: Bucket, own: Tensor) -> Tensor:
        """Return every rank's part of a tensor that is cut as a bucket."""
        bounds, rank = bucket.plan.bounds, bucket.ranks.shard_rank
        whole = torch.zeros(bucket.plan.numel, dtype=own.dtype, device=bucket.format.device)
        whole[bounds[rank] : bounds[rank + 1]] = own
        collectives.all_gather(whole, bounds, bucket.ranks.shard_group).wait()
        return whole

    def _given(self, bucket: Bucket, follower: ShardFollower) -> Tensor:
        """Return what a follower keeps of this rank's pieces of a bucket, shape ``(bucket.numel,)``."""
        dtype = bucket.format.master
        wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
        own = torch.zeros(bucket.numel, dtype=wide, device=bucket.format.device)
        for piece in bucket.pieces:
            follower.give(self._followed_shard(piece, bucket.slice_of(own, piece)))
        return own

    def _followed_shard(self, piece: BucketPiece, values: Tensor) -> TensorShard:
        return piece_shard(self.names[piece.index], None, piece, values, is_owner=True)
