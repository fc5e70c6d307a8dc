"""Torch's own collectives, which devices use, give what our messages over gloo give."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranked import on_ranks

from booster_core.ranks import observed_by
from booster_runtime import collectives
from booster_runtime.collectives import transport


@pytest.mark.parametrize("bounds", [[0, 4, 8], [0, 3, 8]], ids=["even", "uneven"])
@on_ranks(2)
def test_slices_are_summed_gathered_and_exchanged(bounds):
    rank, numel = dist.get_rank(), bounds[-1]
    start, stop = bounds[rank : rank + 2]
    of_ranks = [torch.arange(numel, dtype=torch.float32) * (each + 1) for each in range(2)]
    for dtype in (torch.float32, torch.float64):
        for adds in (False, True):
            out = torch.ones(stop - start, dtype=dtype)
            source = of_ranks[rank].clone()
            transport.reduce_scatter_by_torch(source, bounds, out, None, scale=0.5, accumulate=adds).wait()
            expected = adds + 0.5 * sum(of_ranks)[start:stop]
            torch.testing.assert_close(out, expected.to(dtype), rtol=0, atol=0)
    if bounds[1] == 4:  # gloo gathers nothing else
        buffer = of_ranks[rank].clone()
        transport.all_gather_by_torch(buffer, bounds, rank, None).wait()
        assert torch.equal(buffer, torch.cat([of_ranks[0][:4], of_ranks[1][4:]]))
    received, parts = torch.zeros(2 * (stop - start)), [0, stop - start, 2 * (stop - start)]
    transport.all_to_all_by_torch(of_ranks[rank].clone(), bounds, received, parts, None).wait()
    assert torch.equal(received, torch.cat([each[start:stop] for each in of_ranks]))


@on_ranks(2)
def test_collectives_are_shown_with_their_sizes():
    rank, bounds, seen = dist.get_rank(), [0, 3, 4], []

    def during(call):
        assert call.group is dist.group.WORLD
        seen.append((call.name, call.payload_bytes, call.sent_bytes))
        return contextlib.nullcontext()

    source, out = torch.arange(4.0) + rank, torch.zeros(bounds[rank + 1] - bounds[rank])
    with observed_by(SimpleNamespace(during=during)):
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
    assert seen == [*expected, ("all_gather_object", 0, 0)]
