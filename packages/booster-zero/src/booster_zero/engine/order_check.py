"""`OrderCheck`: ranks compare in every step what they have gathered together since the last one.

Ranks that gather different buckets compute with wrong values. A digest among the flags that they send anyway tells.
Where buckets differ in size, gloo would end the process before that: on CPUs each gather is compared before it begins.
On devices, the monitor names the ranks that wait for each other.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError
from booster_runtime import collectives

if TYPE_CHECKING:
    from collections.abc import Mapping

    from booster_runtime.sharding import ShardingRanks
    from booster_zero.engine.bucket import Bucket

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
