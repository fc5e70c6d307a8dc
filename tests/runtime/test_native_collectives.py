"""Torch's own collectives, which devices use, give what our messages over gloo give."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

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
