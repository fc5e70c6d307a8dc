"""What the monitor says of the collectives that ranks have told it of, under ``BOOSTER_DEBUG=collectives``."""

from __future__ import annotations

import torch.distributed as dist

from booster_core.ranks import current_world


def difference_of_calls() -> str | None:
    """Return how the ranks' collectives differ, on rank 0; ``None`` where they do not, and on other ranks."""
    dist.barrier()  # every rank has told of its calls
    monitor = current_world().monitor
    assert monitor.describe_missing("no call", 1, None) is not None  # it has read all that this rank has told
    dist.barrier()
    failure = None if monitor._server is None else monitor._server._verdicts.failure
    return None if failure is None else failure.text
