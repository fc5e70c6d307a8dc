"""`OrderCheck`: ranks compare what they are about to do together, before they do it.

Ranks that gather different buckets compute with wrong values, and where buckets differ in size, or one rank gathers
more than the others, the backend waits, or ends the process. In every step, ranks compare what they have gathered since
the last one, by a digest among the flags that they send in any case. On CPUs, where gloo would end the process before
that, every gather and every meeting of ranks is also announced by a number before it begins. On accelerators that would
hold up the device; there the monitor names ranks that wait for each other. Reductions are not announced: ranks may
start them at other times, where a parameter is unused on some.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from operator import itemgetter
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError
from booster_runtime import collectives
from booster_runtime.sharding import control_device

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import NoReturn

    from booster_runtime.sharding import ShardingRanks
    from booster_zero.engine.bucket import Bucket

_GENERATE, _MEET, _FIRST_BUCKET = -1, 0, 1
_64_BITS = (1 << 64) - 1
_MOST_KEPT = 10_000
"""Gathers of which numbers are kept between two steps; a digest compares all."""
_SHOWN = 4


class OrderCheck:
    """Compares announcements over the ranks that share buckets.

    Args:
        ranks: These ranks.
        names: Of the parameters, by number.
        remedy: What to do where the data chooses which modules run, for the error.
        device: Where the ranks compute.
        debug: Announce on accelerators, too.

    Attributes:
        announces: Whether it announces; the same on every rank.
    """

    def __init__(
        self, ranks: ShardingRanks, names: Mapping[int, str], remedy: str, device: torch.device, *, debug: bool
    ) -> None:
        self._ranks = ranks
        self._names = names
        self._digest = 0
        self._first: list[int] = []  # gathers since the last step, by the first parameter
        self._compared: list[int] = []
        self._remedy = remedy
        self._device = device
        self.announces = ranks.shard_size > 1 and (debug or device.type == "cpu")

    def meet(self) -> None:
        """Announce the end of a phase, or a call that every rank makes once in a step.

        Raises:
            ConfigError: If another rank gathers a bucket instead.

        Collective: every rank of the shard group, where it announces; else none.
        """
        self._compare(_MEET)

    def generate(self) -> None:
        """Announce that a loop begins in which ranks tell each other whether their texts are complete.

        Raises:
            ConfigError: If another rank does something else.

        Collective: as for `meet`.
        """
        self._compare(_GENERATE)

    def gather(self, bucket: Bucket) -> None:
        """Announce the gather of a bucket.

        Raises:
            ConfigError: If another rank does something else.

        Collective: as for `meet`.
        """
        number = bucket.plan.slots[0].index
        self._digest = hash((self._digest, number))  # the same on every rank, as numbers' hashes are
        if len(self._first) < _MOST_KEPT:
            self._first.append(number)
        self._compare(_FIRST_BUCKET + number)

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
        for of_ranks in by_replica.values():
            for count, numbers in enumerate(itertools.zip_longest(*of_ranks.values()), start=1):
                if len(set(numbers)) > 1:
                    told = [
                        f"{self._describe(each)} on rank {rank}" for rank, each in zip(of_ranks, numbers, strict=True)
                    ]
                    self.raise_other_order(f" Gather {count} since the last step was {', '.join(told[:_SHOWN])}.")
        self.raise_other_order()

    def _describe(self, number: int | None) -> str:
        return "none" if number is None else f"that of '{self._names[number]}'"

    def _doing(self, number: int) -> str:
        if number == _GENERATE:
            return "calls `generate`"
        if number == _MEET:
            return "begins a forward, backward or step"
        return f"gathers '{self._names[number - _FIRST_BUCKET]}'"

    def _compare(self, number: int) -> None:
        if not self.announces:
            return
        told = torch.tensor([number, -number], device=control_device(self._device, self._ranks.gathering))
        collectives.all_reduce(told, dist.ReduceOp.MAX, self._ranks.gathering).wait()
        largest, smallest = told.tolist()
        if largest != -smallest:
            of_ranks = collectives.all_gather_object(number, self._ranks.gathering)
            ranks = dist.get_process_group_ranks(self._ranks.gathering)
            first_of = {each: rank for rank, each in zip(reversed(ranks), reversed(of_ranks), strict=True)}
            told_by = [f"rank {rank} {self._doing(each)}" for each, rank in sorted(first_of.items(), key=itemgetter(1))]
            self.raise_other_order(f" Now {', '.join(told_by[:_SHOWN])}.")

    def raise_other_order(self, where: str = "") -> NoReturn:
        """Raise the error about ranks that used parameters in different orders.

        Args:
            where: What is known of the first difference.

        Raises:
            ConfigError: Always.
        """
        msg = (
            "Ranks used the model's parameters in different orders, so that they would gather, or have gathered, "
            f"different ones together, and compute with wrong values.{where} Call forward, `generate` and `state_dict` "
            f"on every rank, not under `if rank == 0`. {self._remedy}"
        )
        raise ConfigError(msg)
