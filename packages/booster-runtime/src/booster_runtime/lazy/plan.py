"""Which entries of a recording matter for the storages that are wanted, and what must run before what.

An initialiser that is overwritten later is dead: it is left out, except that a dead draw still moves its generator.
Pure functions of the recording.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from booster_runtime.lazy.log import Entry


@dataclass
class Plan:
    """How to replay a recording.

    Args:
        is_live: For each entry, whether its values are needed.
        followers: For each live entry, the later live entries that must wait for it.
        num_awaited: For each live entry, how many earlier ones it waits for, sources not counted.
        sources: For each live entry, the sources that it needs.
        num_uses: For each storage, how many live entries touch it.
    """

    is_live: list[bool]
    followers: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    num_awaited: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    sources: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    num_uses: dict[int, int] = field(default_factory=lambda: defaultdict(int))


def make_plan(entries: Sequence[Entry], wanted: Collection[int]) -> Plan:
    """Plan a replay after which the wanted storages hold their final values.

    Args:
        entries: The recording.
        wanted: Slots.

    Collective: none.
    """
    plan = Plan(find_live(entries, wanted))
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = defaultdict(list)
    for index, entry in enumerate(entries):
        if not plan.is_live[index]:
            continue
        awaited = {writer[slot] for slot in entry.reads | entry.writes if slot in writer}
        for slot in entry.writes:
            awaited.update(readers.pop(slot, ()))
        for earlier in awaited - {index}:
            plan.followers[earlier].append(index)
            if entries[earlier].is_source:
                plan.sources[index].append(earlier)
            else:
                plan.num_awaited[index] += 1
        for slot in entry.reads:
            readers[slot].append(index)
        for slot in entry.writes | entry.makes:
            writer[slot] = index
        for slot in entry.touches:
            plan.num_uses[slot] += 1
    return plan


def find_live(entries: Sequence[Entry], wanted: Collection[int]) -> list[bool]:
    """Return for each entry whether a wanted storage's final values depend on it."""
    needed = set(wanted)
    is_live = [False] * len(entries)
    for index in range(len(entries) - 1, -1, -1):
        entry = entries[index]
        # How many numbers such a draw takes may depend on what it reads (as for poisson), so it always counts.
        if not needed.isdisjoint(entry.writes | entry.makes) or (entry.draw is not None and entry.reads):
            is_live[index] = True
            needed -= entry.covers | entry.makes
            needed |= entry.reads
    return is_live
