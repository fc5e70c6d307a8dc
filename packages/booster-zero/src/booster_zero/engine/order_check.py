"""`OrderCheck`: ranks compare what they are about to do together, before they do it.

Ranks that gather different buckets compute with wrong values, and where buckets differ in size, or one rank gathers
more than the others, the backend waits, or ends the process. So in the first phases every gather and every meeting of
ranks is announced by a number. Later phases are not compared: a message for each gather would cost as much as a small
gather does. Reductions are not announced: ranks may start them at other times, where a parameter is unused on some.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError
from booster_runtime import collectives
from booster_runtime.sharding import between_hosts

if TYPE_CHECKING:
    from typing import NoReturn

    from booster_runtime.sharding import ShardingRanks
    from booster_zero.engine.bucket import Bucket

_MEET, _FIRST_BUCKET = 0, 1


class OrderCheck:
    """Compares announcements over the ranks that share buckets.

    Args:
        ranks: These ranks.
        remedy: What to do where the data chooses which modules run, for the error.

    Attributes:
        is_on: Whether it compares; the same on every rank.
    """

    def __init__(self, ranks: ShardingRanks, remedy: str) -> None:
        self._ranks = ranks
        self._remedy = remedy
        self.is_on = ranks.shard_size > 1

    def meet(self, device: torch.device) -> None:
        """Announce a call that every rank makes once in a step.

        Raises:
            ConfigError: If another rank gathers a bucket instead.

        Collective: every rank of the shard group, where it compares; else none.
        """
        self._compare(_MEET, device)

    def gather(self, bucket: Bucket) -> None:
        """Announce the gather of a bucket.

        Raises:
            ConfigError: If another rank does something else.

        Collective: as for `meet`.
        """
        self._compare(_FIRST_BUCKET + bucket.plan.slots[0].index, bucket.format.device)

    def _compare(self, number: int, device: torch.device) -> None:
        if not self.is_on:
            return
        told = torch.tensor([number, -number], device=between_hosts(device, self._ranks.gathering))
        collectives.all_reduce(told, dist.ReduceOp.MAX, self._ranks.gathering).wait()
        largest, smallest = told.tolist()
        if largest != -smallest:
            self.raise_other_order()

    def raise_other_order(self) -> NoReturn:
        """Raise the error about ranks that used parameters in different orders.

        Raises:
            ConfigError: Always.
        """
        msg = (
            "Ranks used the model's parameters in different orders, so that they would gather, or have gathered, "
            f"different ones together, and compute with wrong values. {self._remedy}"
        )
        raise ConfigError(msg)
