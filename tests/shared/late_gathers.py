"""Gathers whose values are there only when they have been waited for, as on a device that computes on."""

import contextlib
import random
import time

import torch.distributed as dist

from booster_runtime import collectives
from booster_runtime.collectives import Pending


@contextlib.contextmanager
def hidden_until_waited_for(hides=lambda _: True, *, is_nan=True, most_seconds=0.0):
    """Hide what other ranks bring until it has been waited for.

    Args:
        hides: Whether to hide what is gathered into a buffer.
        is_nan: Have NaN in its place; else it stays as it was before.
        most_seconds: Wait up to as long by chance before and after.
    """
    real, chance = collectives.all_gather, random.Random(dist.get_rank())

    def gather(buffer, bounds, group=None):
        if not hides(buffer):
            return real(buffer, bounds, group)
        rank, values = dist.get_rank(group), buffer.clone()
        pending = real(values, bounds, group)
        if is_nan:
            buffer[: bounds[rank]] = float("nan")
            buffer[bounds[rank + 1] :] = float("nan")
        time.sleep(most_seconds * chance.random())

        def show():
            time.sleep(most_seconds * chance.random())
            buffer.copy_(values)

        return Pending([pending], show)

    collectives.all_gather = gather
    try:
        yield
    finally:
        collectives.all_gather = real
