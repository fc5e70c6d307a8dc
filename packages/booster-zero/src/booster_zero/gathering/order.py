"""`OrderCheck`: ranks compare what they are about to do together, before they do it.

Ranks that gather different chunks compute with wrong values, and where chunks differ in size, or one rank gathers more
than the others, the backend waits, or ends the process. So in the first phases every gather and every meeting of
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
from booster_zero.engine.bucket import Bucket

if TYPE_CHECKING:
    from typing import Any, NoReturn

    from booster_runtime.sharding import ShardingRanks

_MEET, _FIRST_CHUNK = 0, 1


class OrderCheck:
    """Compares announcements over the ranks that share chunks.

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
            ConfigError: If another rank gathers a chunk instead.

        Collective: every rank of the shard group, where it compares; else none.
        """
        self._compare(_MEET, device)

    def gather(self, chunk: Bucket) -> None:
        """Announce the gather of a chunk.

        Raises:
            ConfigError: If another rank does something else.

        Collective: as for `meet`.
        """
        self._compare(_FIRST_CHUNK + chunk.plan.slots[0].index, chunk.format.device)

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


class Chunk(Bucket):
    """A bucket whose gathers are announced.

    Args:
        order: Compares them.
        *args: As for `Bucket`.
        **kwargs: As for `Bucket`.
    """

    def __init__(self, order: OrderCheck, *args: Any, **kwargs: Any) -> None:
        self._order = order
        super().__init__(*args, **kwargs)

    def start_gather(self) -> None:
        """Start gathering the whole values; see `Bucket.start_gather`.

        Raises:
            ConfigError: If ranks do something else in the first phases.
        """
        self._order.gather(self)
        super().start_gather()
