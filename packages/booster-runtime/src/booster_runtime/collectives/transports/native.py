"""Reduce-scatter, all-gather and all-to-all by torch's own collectives, for devices."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from booster_runtime.collectives.pending import Pending
from booster_runtime.collectives.sums import sum_into

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup


def _is_even(bounds: Sequence[int]) -> bool:
    if isinstance(bounds, range):
        return True
    step = bounds[1] - bounds[0]
    return all(after - before == step for before, after in pairwise(bounds))


def reduce_scatter(
    source: Tensor, bounds: Sequence[int], out: Tensor, group: ProcessGroup | None, *, scale: float, accumulate: bool
) -> Pending:
    """Start summing a flat buffer over ranks; see `booster_runtime.collectives.reduce_scatter`."""
    rank = dist.get_rank(group)
    own = source.new_empty(bounds[rank + 1] - bounds[rank])
    op = dist.ReduceOp.SUM
    if source.dtype == torch.float16:
        # A sum of scaled gradients may overflow where their average does not.
        op, scale = dist.ReduceOp.AVG, scale * dist.get_world_size(group)
    if _is_even(bounds):
        # torch 2.13 renamed it, and warns of the old name; older versions know no other.
        call: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        work = call(own, source, op, group=group, async_op=True)
    else:
        slices = [source[start:stop] for start, stop in pairwise(bounds)]
        work = dist.reduce_scatter(own, slices, op, group=group, async_op=True)
    return Pending([work], lambda: sum_into(out, [own], scale=scale, accumulate=accumulate), keep=source)


def all_gather(buffer: Tensor, bounds: Sequence[int], group: ProcessGroup | None) -> Pending:
    """Start filling a flat buffer with the ranks' slices; see `booster_runtime.collectives.all_gather`."""
    rank = dist.get_rank(group)
    own = buffer[bounds[rank] : bounds[rank + 1]]
    if _is_even(bounds):
        call: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = call(buffer, own, group=group, async_op=True)
    else:
        slices = [buffer[start:stop] for start, stop in pairwise(bounds)]
        work = dist.all_gather(slices, own, group=group, async_op=True)
    return Pending([work], keep=buffer)


def all_to_all(
    source: Tensor, sent: Sequence[int], out: Tensor, received: Sequence[int], group: ProcessGroup | None
) -> Pending:
    """Start exchanging slices of flat buffers; see `booster_runtime.collectives.all_to_all`."""
    out_lengths, source_lengths = ([stop - start for start, stop in pairwise(bounds)] for bounds in (received, sent))
    work = dist.all_to_all_single(out, source, out_lengths, source_lengths, group=group, async_op=True)
    return Pending([work], keep=(source, out))
