"""Observers see collectives with their sizes, and collectives do the same under them."""

import contextlib

import torch
import torch.distributed as dist

from booster_core.ranks import observed_by
from booster_runtime import collectives
from booster_testing import run_on_ranks


class Sizes:
    """Writes down names and bytes."""

    def __init__(self):
        self.seen = []

    def during(self, call):
        assert call.group is dist.group.WORLD
        self.seen.append((call.name, call.payload_bytes, call.sent_bytes))
        return contextlib.nullcontext()


def call_all():
    rank, bounds = dist.get_rank(), [0, 3, 4]
    source, out = torch.arange(4.0) + rank, torch.zeros(bounds[rank + 1] - bounds[rank])
    results = []
    collectives.reduce_scatter(source, bounds, out).wait()
    results.append(out.tolist())
    collectives.reduce_scatter([(0, source[:2]), (2, source[2:])], bounds, out).wait()
    results.append(out.tolist())
    collectives.reduce_scatter([(0, source.view(2, 2))], bounds, out).wait()
    results.append(out.tolist())
    for start in (
        lambda buffer: collectives.all_gather(buffer, bounds),
        collectives.all_reduce,
        collectives.broadcast,
        lambda buffer: collectives.all_to_all(source, [0, 2, 4], buffer, [0, 2, 4]),
    ):
        buffer = source.clone()
        start(buffer).wait()
        results.append(buffer.tolist())
    results.append(collectives.all_gather_object(rank))
    return results


def observe():
    sizes = Sizes()
    plain = call_all()
    with observed_by(sizes):
        observed = call_all()
    assert call_all() == plain == observed
    return sizes.seen


def test_collectives_are_shown_with_their_sizes():
    for rank, seen in enumerate(run_on_ranks(observe, 2)):
        sent = 4 if rank == 0 else 12  # all but the own slice, of 3 elements and 1
        calls = [
            *[("reduce_scatter", 16, sent)] * 3, ("all_gather", 16, sent),
            ("all_reduce", 16, 16), ("broadcast", 16, 16), ("all_to_all", 16, 8),
        ]  # fmt: skip
        # Each is shown when it starts, and again, without bytes, when it is waited for.
        expected = [shown for call in calls for shown in (call, (call[0], 0, 0))]
        assert seen == [*expected, ("all_gather_object", 0, 0)]
