"""How buckets are used: in which order, whether that is one on all ranks, and what scripts write meanwhile.

A *phase* is one forward or one backward. Phases of one kind (training forward, evaluation, backward) are expected to
use buckets in the order of the last one of their kind; where one does not, the expectation is taken up again at the
next bucket that fits (`Timeline`).

Ranks that gather different buckets compute with wrong values. A digest among the flags that they send in each step
anyway tells (`OrderCheck`). Where buckets differ in size, gloo would end the process before that: on CPUs each gather
is compared before it begins. On devices, the monitor names the ranks that wait for each other.

What scripts write into parameters while these are gathered would be lost when they are resharded (`WriteWatch`).
Versions tell of operations in place, addresses of ``.data = ...``. What goes through ``.data`` leaves no trace but the
values. Those are compared up to the first step, as activation normalization of flows sets parameters by the first batch
(Kingma and Dhariwal, Glow, 2018), and at the end of `ShardedModel.whole_parameters`, each rank's own shard.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError
from booster_core.plugin import sum_of_bits
from booster_runtime import collectives
from booster_zero.engine.bucket import INTEGERS

if TYPE_CHECKING:
    from collections.abc import Container, Hashable, Mapping

    from torch import Tensor

    from booster_runtime.sharding import ShardingRanks
    from booster_zero.engine.bucket import Bucket


class Timeline:
    """What was used, and what will be.

    Attributes:
        kind: The kind of the present phase; ``None`` between phases.
    """

    def __init__(self) -> None:
        self.kind: Hashable | None = None
        self._expected: list[int] = []
        self._cursor = 0
        self._present: list[int] = []
        self._recorded: dict[Hashable, list[int]] = {}

    def begin(self, kind: Hashable) -> None:
        """Begin a phase, ending the one that may be open."""
        self.end()
        self.kind = kind
        self._expected = self._recorded.get(kind, [])
        self._cursor = 0
        self._present = []

    def end(self) -> None:
        """End the present phase and remember its order."""
        if self.kind is not None:
            self._recorded[self.kind] = self._present
        self.kind = None
        self._expected = []

    def note(self, bucket: int) -> None:
        """Note the use of a bucket, by its number; repetitions in a row are one use."""
        if self._present and self._present[-1] == bucket:
            return
        self._present.append(bucket)
        try:
            self._cursor = self._expected.index(bucket, self._cursor) + 1
        except ValueError:
            return  # not expected any more: what comes next is as likely as before

    def upcoming(self, most: int) -> list[int]:
        """Return the buckets that are expected next, each once, at most so many."""
        found: list[int] = []
        for bucket in itertools.islice(self._expected, self._cursor, None) if most else ():
            if bucket not in found:
                found.append(bucket)
                most -= 1
                if not most:
                    break
        return found

    def forget(self) -> None:
        """Drop all records, because buckets have got other numbers."""
        self.kind = None
        self._recorded = {}
        self._expected = []
        self._present = []
        self._cursor = 0


_64_BITS = (1 << 64) - 1
_MOST_KEPT = 10_000
"""Gathers of which numbers are kept between two steps; a digest compares all."""
_SHOWN = 4


class OrderCheck:
    """Compares what ranks that share buckets have gathered.

    Args:
        ranks: These ranks.
        names: Of the parameters, by number.
        remedy: What to do where the data chooses which modules run, for the error.
        device: Where the buckets are.
    """

    def __init__(self, ranks: ShardingRanks, names: Mapping[int, str], remedy: str, device: torch.device) -> None:
        self._ranks, self._names, self._remedy = ranks, names, remedy
        nothing = torch.empty(0, device=device)
        self._compares_first = ranks.shard_size > 1 and not collectives.is_by_torch(nothing, ranks.gathering)
        self._digest = 0
        self._first: list[int] = []  # gathers since the last step, by the first parameter
        self._compared: list[int] = []

    def note(self, bucket: Bucket) -> None:
        """Note that a bucket is gathered.

        Raises:
            ConfigError: On CPUs, if another rank gathers another one.

        Collective: on CPUs, every rank of the shard group.
        """
        number = bucket.plan.slots[0].index
        self._digest = hash((self._digest, number))  # the same on every rank, as numbers' hashes are
        if len(self._first) < _MOST_KEPT:
            self._first.append(number)
        if self._compares_first and not collectives.same_on_all(number, self._ranks.gathering):
            of_ranks = collectives.all_gather_object(number, self._ranks.gathering)
            told = [f"rank {rank} that of {self._names[each]!r}" for rank, each in enumerate(of_ranks)]
            where = f" Now {', '.join(told[:_SHOWN])}."
            raise self._error(where)

    def flags(self) -> bytes:
        """Return a digest of the gathers since the last call, and its complement, at the place of this replica.

        If ranks that gather together differ, so does some byte's maximum.
        """
        digest = (self._digest & _64_BITS).to_bytes(8, "little")
        self._compared, self._first, self._digest = self._first, [], 0
        flags = bytearray(16 * (dist.get_world_size(self._ranks.holders) // self._ranks.shard_size))
        begin = 16 * self._ranks.replica_rank
        flags[begin : begin + 16] = digest + bytes(255 - byte for byte in digest)
        return bytes(flags)

    def check(self, most: bytes) -> None:
        """Raise if ranks that gather together have gathered other buckets, or in another order.

        Args:
            most: The largest of each byte of `flags` over all that hold the same parameters.

        Raises:
            ConfigError: On all of them, if any differ.

        Collective: all that hold the same parameters, if any differ; else none.
        """
        pairs = (
            zip(most[each : each + 8], most[each + 8 : each + 16], strict=True) for each in range(0, len(most), 16)
        )
        if all(high + low == 255 for high, low in itertools.chain(*pairs)):
            return
        own = (self._ranks.replica_rank, self._compared)
        by_replica: dict[int, dict[int, list[int]]] = defaultdict(dict)
        for rank, (replica, gathers) in enumerate(collectives.all_gather_object(own, self._ranks.holders)):
            by_replica[replica][rank] = gathers
        where = next((told for told in map(self._first_difference, by_replica.values()) if told), "")
        raise self._error(where)

    def _error(self, where: str) -> ConfigError:
        return ConfigError(
            "Ranks used the model's parameters in different orders, so that they would gather, or have gathered, "
            f"different ones together, and compute with wrong values.{where} Call forward, `generate` and `state_dict` "
            f"on every rank, not under `if rank == 0`. {self._remedy}"
        )

    def _first_difference(self, of_ranks: Mapping[int, list[int]]) -> str:
        """Return what is told of the first gather that was not the same on some ranks; nothing if all were."""
        for count, numbers in enumerate(itertools.zip_longest(*of_ranks.values()), start=1):
            if len(set(numbers)) > 1:
                told = [
                    f"{'none' if each is None else f'that of {self._names[each]!r}'} on rank {rank}"
                    for rank, each in zip(of_ranks, numbers, strict=True)
                ]
                return f" Gather {count} since the last step was {', '.join(told[:_SHOWN])}."
        return ""


class WriteWatch:
    """Remembers parameters as they were shown, and finds those that are others when they are hidden.

    Args:
        names: The parameters' names, by number.
        set_in_forward: Numbers of parameters that the model's forward sets to themselves, which raises their versions.

    Collective: none of its methods.
    """

    def __init__(self, names: Mapping[int, str], set_in_forward: Container[int] = ()) -> None:
        self._names, self._set_in_forward = names, set_in_forward
        self._found: dict[str, str] = {}
        self._seen: dict[Bucket, list[int]] = {}
        self._sums: dict[Bucket, list[int]] = {}  # of values, until the first step
        self._has_stepped = False

    def note_shown(self, bucket: Bucket, *, sums: bool) -> None:
        """Remember a bucket's parameters, which are here, as they are now; with ``sums``, their values until a step."""
        self._seen[bucket] = [each._version for each in bucket.parameters]  # noqa: SLF001 - no public name
        if sums and not self._has_stepped:
            self._sums[bucket] = _sums_of(bucket)

    def note_hidden(self, bucket: Bucket) -> None:
        """Compare a bucket's parameters with what was remembered, and forget that."""
        before, sums = self._seen.pop(bucket, None), self._sums.pop(bucket, None)
        if before is None:
            return
        if sums is not None:
            for slot, was, is_now in zip(bucket.plan.slots, sums, _sums_of(bucket), strict=True):
                if was != is_now and slot.index not in self._set_in_forward:
                    self._found[self._names[slot.index]] = "was changed through `.data`"
        now = [each._version for each in bucket.parameters]  # noqa: SLF001 - as above
        addresses, expected = bucket.addresses(), bucket.expected_addresses()
        if now == before and addresses == expected:
            return
        for position, (slot, parameter) in enumerate(zip(bucket.plan.slots, bucket.parameters, strict=True)):
            # bitsandbytes' layers give their weights other memory in each forward, with the same values.
            if addresses[position] != expected[position] and not _is_equal(bucket, slot.offset, parameter):
                self._found[self._names[slot.index]] = "was given other memory"
            elif now[position] != before[position] and slot.index not in self._set_in_forward:
                self._found[self._names[slot.index]] = "was changed in place"

    def compare(self, bucket: Bucket) -> None:
        """Compare this rank's shard with its part of the whole values, which are here, as bits: NaN differs from NaN.

        Nothing is compared where the memory moves shards, nor where this rank has all of them: it loses none.
        """
        if bucket.ranks.shard_size == 1 or bucket.memory.moves:
            return
        assert bucket.whole is not None, "asked of parameters that are here"
        low, high = bucket.plan.bounds[bucket.ranks.shard_rank : bucket.ranks.shard_rank + 2]
        bits = INTEGERS[bucket.format.working.itemsize]
        shard, gathered = bucket.own.view(bits), bucket.whole[low:high].view(bits)
        if not torch.equal(shard, gathered):
            for piece in bucket.pieces:
                if not torch.equal(bucket.slice_of(shard, piece), bucket.slice_of(gathered, piece)):
                    self._found.setdefault(self._names[piece.index], "was changed through `.data`")

    def forget(self) -> None:
        """Compare nothing that has been shown so far: shards are about to get other values."""
        self._seen, self._sums = {}, {}

    def take_found(self) -> dict[str, str]:
        """Return how parameters were changed, by name, since the last call."""
        found, self._found = self._found, {}
        return found

    def note_step(self) -> None:
        """Note that a step has begun: what goes through ``.data`` is looked for before the first one alone."""
        self._has_stepped, self._sums = True, {}


def _sums_of(bucket: Bucket) -> list[int]:
    """Return the sum over the bits of each parameter's values, which are here."""
    assert bucket.whole is not None, "asked of parameters that are here"
    parts = (bucket.whole[slot.offset : slot.offset + slot.numel] for slot in bucket.plan.slots)
    sums: list[int] = torch.stack([*map(sum_of_bits, parts)]).tolist()
    return sums


def _is_equal(bucket: Bucket, offset: int, parameter: Tensor) -> bool:
    assert bucket.whole is not None, "asked of parameters that are here"
    own = bucket.whole[offset : offset + parameter.numel()].view(parameter.shape)
    is_like = (parameter.dtype, parameter.device) == (own.dtype, own.device)
    return not parameter.requires_grad and is_like and torch.equal(parameter.detach(), own)


def changed_error(every: Mapping[int, Mapping[str, str]]) -> ConfigError | None:
    """Return the error for parameters that were changed by hand, given by rank how; ``None`` if there are none."""
    told = [
        f"rank {rank}: " + ", ".join(f"'{name}' {how}" for name, how in [*of_rank.items()][:10])
        for rank, of_rank in every.items()
        if of_rank
    ]
    if not told:
        return None
    return ConfigError(
        f"Parameters were changed by hand, where their values are not kept. {'; '.join(told)}. Change values after "
        "`optimizer.step()`, on every rank inside of `with model.whole_parameters(writes=True):` with the model that "
        "`boost` returned, not in its forward; or with `booster.load_model`. What a first batch sets, set before "
        "`boost`."
    )
