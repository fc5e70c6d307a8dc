"""Whether ranks that hold the same part of a tensor hold the same values of it, by digests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from booster_core.errors import CheckpointError, shorten
from booster_core.state.shard import as_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from booster_core.ranks import DistCoordinator
    from booster_core.state.shard import TensorShard

Place = tuple[str, str, str, str]
"""A tensor's name, the name of the state (``""`` for the model's), the box and the flat range."""


def replica_digests(shards: Iterable[TensorShard]) -> Iterator[tuple[Place, int]]:
    """Yield each part of a tensor that this rank holds, with 64 bits of digest of its values.

    Ranges that follow each other are one part: ranks that hold the same whole tensor may cut it in other places.

    Args:
        shards: As an adapter lists them.
    """
    of, start, stop, found = ("", "", ""), 0, 0, xxhash.xxh3_64()
    for shard in shards:
        here, (first, last) = (shard.name, shard.state or "", str(shard.box)), shard.flat_range
        if here != of or first != stop:
            if of[0]:
                yield (*of, f"{start}:{stop}"), found.intdigest()
            of, start, found = here, first, xxhash.xxh3_64(str(shard.dtype).encode())
        stop = last
        found.update(as_bytes(shard.data.detach().cpu().contiguous()))
    if of[0]:
        yield (*of, f"{start}:{stop}"), found.intdigest()


def check_equal_replicas(
    shards: Iterable[TensorShard], coordinator: DistCoordinator, *, call: str, remedy: str, but: Collection[str] = ()
) -> None:
    """Raise if ranks that hold the same part of a tensor hold other values: a save would take each from one of them.

    Args:
        shards: What this rank holds.
        coordinator: Of the ranks.
        call: What the user called.
        remedy: What to do about it.
        but: Names of tensors of which one rank's values are taken on purpose.

    Raises:
        CheckpointError: If so.

    Collective: every rank.
    """
    own = dict(replica_digests(shard for shard in shards if shard.name not in but))
    seen: dict[Place, set[int]] = {}
    for of_rank in coordinator.all_gather_object(own, name=f"{call} (replicas)"):
        for place, number in of_rank.items():
            seen.setdefault(place, set()).add(number)
    differ = list(dict.fromkeys(place[0] for place, numbers in seen.items() if len(numbers) > 1))
    if differ:
        msg = (
            f"`{call}` would write a mixture: ranks hold different values of {len(differ)} tensors that each of them "
            f"has: {shorten(differ)}. {remedy}"
        )
        raise CheckpointError(msg)
