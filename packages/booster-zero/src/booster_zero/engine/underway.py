"""The reductions that are underway: `Underway` bounds how many, and lends them memory to receive into.

Where shards have replicas, a bucket is averaged over these as soon as it is in its shard, while backward runs. Every
rank does so between the same two reductions, whatever the ranks' timing: backends of devices need one order of all.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from booster_runtime.collectives import Pending
    from booster_zero.engine.bucket import Bucket


class Underway:
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

    def _borrow(self, bucket: Bucket) -> Tensor:
        """Return memory to receive into, long enough for any bucket; a few pieces serve all of them in turn."""
        wire = bucket.format.wire
        spare = self._spare.setdefault(wire, [])
        if spare:
            return spare.pop()
        return torch.empty(max(each.scratch_numel for each in self._buckets if each.format.wire == wire), dtype=wire)
