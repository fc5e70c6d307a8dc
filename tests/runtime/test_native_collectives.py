"""Torch's own collectives, which devices use, give what our messages over gloo give."""

import contextlib
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from ranked import on_ranks

from booster_core.ranks import observed_by
from booster_runtime import collectives
from booster_runtime.collectives import transport
from booster_testing import run_on_ranks


def values_of(rank, numel):
    return torch.arange(numel, dtype=torch.float32) * (rank + 1)


def exchange(bounds):
    """Return what this rank gets of a sum, a gather and an exchange."""
    rank, size, numel = dist.get_rank(), dist.get_world_size(), bounds[-1]
    outs = [torch.ones(bounds[rank + 1] - bounds[rank], dtype=dtype) for dtype in (torch.float32, torch.float64) * 2]
    for number, out in enumerate(outs):
        source, adds = values_of(rank, numel), number > 1
        transport.reduce_scatter_by_torch(source, bounds, out, None, scale=0.5, accumulate=adds).wait()
    buffer = values_of(rank, numel).clone()
    if bounds[1] - bounds[0] == bounds[2] - bounds[1]:  # gloo gathers nothing else
        transport.all_gather_by_torch(buffer, bounds, rank, None).wait()
    length = bounds[rank + 1] - bounds[rank]
    received = torch.zeros(length * size)
    transport.all_to_all_by_torch(
        values_of(rank, numel), bounds, received, [length * each for each in range(size + 1)], None
    ).wait()
    return outs, buffer, received


@pytest.mark.parametrize("bounds", [[0, 4, 8], [0, 3, 8]], ids=["even", "uneven"])
def test_slices_are_summed_gathered_and_exchanged(bounds):
    numel = bounds[-1]
    gathered = torch.cat([values_of(rank, numel)[start:stop] for rank, (start, stop) in enumerate(pairwise(bounds))])
    for (outs, buffer, received), (start, stop) in zip(
        run_on_ranks(exchange, 2, bounds), pairwise(bounds), strict=True
    ):
        total = values_of(0, numel) + values_of(1, numel)
        for number, out in enumerate(outs):
            expected = (number > 1) + 0.5 * total[start:stop]
            torch.testing.assert_close(out, expected.to(out.dtype), rtol=0, atol=0)
        assert bounds[1] != 4 or torch.equal(buffer, gathered)
        assert torch.equal(received, torch.cat([values_of(rank, numel)[start:stop] for rank in range(2)]))


class Sizes:
    """Writes down names and bytes."""

    def __init__(self):
        self.seen = []

    def during(self, call):
        assert call.group is dist.group.WORLD
        self.seen.append((call.name, call.payload_bytes, call.sent_bytes))
        return contextlib.nullcontext()


@on_ranks(2)
def test_collectives_are_shown_with_their_sizes():
    rank, bounds, sizes = dist.get_rank(), [0, 3, 4], Sizes()
    source, out = torch.arange(4.0) + rank, torch.zeros(bounds[rank + 1] - bounds[rank])
    with observed_by(sizes):
        for parts in (source, [(0, source[:2]), (2, source[2:])], [(0, source.view(2, 2))]):
            collectives.reduce_scatter(parts, bounds, out).wait()
        collectives.all_gather(source.clone(), bounds).wait()
        collectives.all_reduce(source.clone()).wait()
        collectives.broadcast(source.clone()).wait()
        collectives.all_to_all(source, [0, 2, 4], source.clone(), [0, 2, 4]).wait()
        collectives.all_gather_object(rank)
    sent = 4 if rank == 0 else 12  # all but the own slice, of 3 elements and 1
    calls = [
        *[("reduce_scatter", 16, sent)] * 3, ("all_gather", 16, sent),
        ("all_reduce", 16, 16), ("broadcast", 16, 16), ("all_to_all", 16, 8),
    ]  # fmt: skip
    # Each is shown when it starts, and again, without bytes, when it is waited for.
    expected = [shown for call in calls for shown in (call, (call[0], 0, 0))]
    assert sizes.seen == [*expected, ("all_gather_object", 0, 0)]
