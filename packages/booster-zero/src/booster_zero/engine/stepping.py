"""Many shards ready for one step of the optimizer."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from booster_zero.engine.shard import Shard


@contextlib.contextmanager
def stepping_on(shards: Sequence[Shard]) -> Iterator[None]:
    """Have the pieces of many shards ready for one step; see `Shard.stepping`."""
    with contextlib.ExitStack() as stack:
        for shard in shards:
            if shard.home.moves:
                stack.enter_context(shard.stepping())
        shown = [(shard, shard.show_gradients()) for shard in shards if not shard.home.moves]
        try:
            yield
        finally:
            for shard, before in shown:
                shard.show_again(before)
