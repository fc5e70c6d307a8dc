"""Collectives that ranks tell of (``BOOSTER_DEBUG=collectives``), compared as they come: no rank waits for it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from booster_core.ranks import name_ranks
from booster_runtime.collectives.call_sites import NotedCall

if TYPE_CHECKING:
    from collections.abc import Mapping

_REMEDY = "Every rank must make the same calls in the same order."


class NotedCalls:
    """The calls of each group that not all of its ranks have told of yet, and each rank's last one."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, tuple[int, ...], int], dict[int, NotedCall]] = defaultdict(dict)
        self._last: dict[int, NotedCall] = {}

    def add(self, rank: int, call: NotedCall) -> str | None:
        """Take note of a rank's call; say how it differs from the same one of others, if it does."""
        self._last[rank] = call
        key = call.group, call.ranks, call.number
        calls = self._calls[key]
        calls[rank] = call
        if len(calls) == len(call.ranks):
            del self._calls[key]
        return _describe_differing(calls) or _describe_exchange(call.ranks, calls)

    def last(self, rank: int) -> str:
        """Say what a rank has called last, as the end of a sentence about its place; nothing where it told of none."""
        call = self._last.get(rank)
        return "" if call is None else f", its last collective being {describe_last(call)}"


def parse_noted(value: Mapping[str, Any], world_size: int) -> NotedCall:
    """Return the call that a message tells of.

    Raises:
        Exception: If it tells of none, of whichever kind.
    """
    ranks = tuple(rank for rank in map(int, value["ranks"]) if 0 <= rank < world_size)
    sent, received = (tuple(map(int, value[name])) for name in ("sent", "received"))
    if sent and not len(sent) == len(received) == len(ranks):
        msg = f"{len(sent)} and {len(received)} lengths for {len(ranks)} ranks"
        raise ValueError(msg)
    return NotedCall(
        group=str(value["group"]),
        ranks=ranks,
        number=int(value["number"]),
        what=str(value["what"]),
        site=str(value["site"]),
        caller=str(value["caller"]),
        sent=sent,
        received=received,
    )


def describe_last(call: NotedCall) -> str:
    """Name a call with its number."""
    return f"number {call.number} of the group of {name_ranks(call.ranks)}, {call}"


def _describe_differing(calls: Mapping[int, NotedCall]) -> str | None:
    by_kind: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank in sorted(calls):
        by_kind[calls[rank].kind].append(rank)
    if len(by_kind) < 2:
        return None
    parts = [
        f"{name_ranks(ranks)} {'calls' if len(ranks) == 1 else 'call'} {calls[ranks[0]]}" for ranks in by_kind.values()
    ]
    first = next(iter(calls.values()))
    return (
        f"the ranks call different collectives as number {first.number} of the group of {name_ranks(first.ranks)}: "
        f"{'; '.join(parts)}. {_REMEDY}"
    )


def _describe_exchange(ranks: tuple[int, ...], calls: Mapping[int, NotedCall]) -> str | None:
    """Say which rank sends another more or less than that expects."""
    for index, sender in enumerate(ranks):
        for other, receiver in enumerate(ranks):
            here, there = calls.get(sender), calls.get(receiver)
            if here is None or there is None or not here.sent or not there.received:
                continue
            sent, expected = here.sent[other], there.received[index]
            if sent != expected:
                return (
                    f"rank {sender} sends {sent} elements to rank {receiver}, which expects {expected}, in number "
                    f"{here.number} of the group of {name_ranks(ranks)}: rank {sender} by {here}; rank {receiver} by "
                    f"{there}."
                )
    return None
