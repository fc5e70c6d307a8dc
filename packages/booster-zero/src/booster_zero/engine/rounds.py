"""Rounds of reductions, one for a backward: how far buckets have come (`Round`), and which are under way.

Where shards have replicas, a bucket is averaged over these as soon as it is in its shard, while backward runs. Every
rank does so between the same two reductions, whatever the ranks' timing: backends of devices need one order of all.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from booster_runtime.collectives import Pending
    from booster_zero.engine.bucket import Bucket


@dataclass(eq=False, slots=True)
class BucketProgress:
    """How far a bucket has come in the present round.

    Attributes:
        missing: Number of gradients that are awaited.
        waits_for_end: Whether the bucket is reduced at the end of the round only.
        gradients: The gradients that have come, flat and in the format that travels, by parameter.
        taken: The parameters that none is awaited of any more.
        is_started: Whether the bucket is being reduced.
    """

    missing: int = 0
    waits_for_end: bool = False
    gradients: dict[int, Tensor] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    is_started: bool = False

    def leave_out(self, index: int) -> None:
        """Await no gradient of a trained parameter."""
        if index not in self.taken:
            self.taken.add(index)
            self.missing -= 1


class Round:
    """The fillings of one round, in the order in which their buckets are reduced.

    A gradient asks for the first bucket that is not reduced yet, and not for all of them: there may be thousands.

    Args:
        fillings: Each bucket's.

    Attributes:
        fillings: The same by bucket; one that is not among them takes no part.
    """

    def __init__(self, fillings: Iterable[tuple[Bucket, BucketProgress]] = ()) -> None:
        self.fillings = dict(fillings)
        self._waiting = deque(self.fillings.items())

    def add(self, bucket: Bucket, filling: BucketProgress) -> None:
        """Let a bucket take part that has trained parameters only now; it comes last."""
        self.fillings[bucket] = filling
        self._waiting.append((bucket, filling))

    def take_complete(self) -> Iterator[tuple[Bucket, BucketProgress]]:
        """Yield the buckets that can be reduced now; whoever calls this starts each of them before the next."""
        while self._waiting:
            bucket, filling = self._waiting[0]
            if filling.missing > 0 or filling.waits_for_end:
                return
            self._waiting.popleft()
            yield bucket, filling

    def take_rest(self) -> Iterator[tuple[Bucket, BucketProgress]]:
        """Yield all other buckets, as above."""
        while self._waiting:
            yield self._waiting.popleft()


class InflightReductions:
    """Reductions that were started, in that order.

    Args:
        buckets: All buckets that may be reduced.

    Attributes:
        averages: Whether buckets are averaged over the replicas of their shards once they are reduced; else that is
            left to who calls `Bucket.start_average`.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.averages = True
        self._reducing: deque[tuple[Bucket, Pending, Tensor]] = deque()
        self._averaging: deque[Pending] = deque()
        self.set_buckets(buckets)

    def set_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Reduce these buckets from now on. None of others is underway."""
        self._buckets = buckets
        self._spare: dict[torch.dtype, list[Tensor]] = {}

    def start(self, bucket: Bucket, gradients: Mapping[int, Tensor]) -> None:
        """Start reducing a bucket; see `Bucket.start_reduction`.

        Collective: the shard group, or the replicas, in the same order among buckets.
        """
        scratch = self._borrow(bucket)
        self._reducing.append((bucket, bucket.start_reduction(gradients, scratch), scratch))

    def wait_until(self, most: int) -> None:
        """Wait for the oldest buckets until at most so many are being reduced, and as many averaged; without gradients.

        Collective: the shards' replicas, where buckets are averaged.
        """
        while len(self._reducing) > most:
            bucket, pending, scratch = self._reducing.popleft()
            pending.wait()
            self._spare.setdefault(scratch.dtype, []).append(scratch)
            if self.averages and bucket.awaits_average:
                self._averaging.append(bucket.start_average())
        while len(self._averaging) > most:
            self._averaging.popleft().wait()

    def give_back(self) -> None:
        """Give back what reductions have borrowed; none is underway. Until the next round, activations need it."""
        self._spare = {}

    def _borrow(self, bucket: Bucket) -> Tensor:
        """Return memory to receive into; a few pieces serve all buckets of a round in turn."""
        numel, wire = bucket.scratch_numel, bucket.format.wire
        spare = self._spare.setdefault(wire, [])
        sizes = [*map(torch.Tensor.numel, spare)]
        chosen = -1  # what is too small makes room
        for position, size in enumerate(sizes):
            if size >= numel and not numel <= sizes[chosen] <= size:
                chosen = position
        taken = spare.pop(chosen) if spare else None
        return torch.empty(numel, dtype=wire) if taken is None or sizes[chosen] < numel else taken
