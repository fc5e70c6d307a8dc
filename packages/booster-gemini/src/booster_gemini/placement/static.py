"""Placement by fixed fractions: some blocks stay, the others are offloaded whenever they are not in use."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from booster_gemini.placement.policy import Kind, Moves, PlacementPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from booster_gemini.placement.policy import Key, Request


class StaticPlacement(PlacementPolicy):
    """Keeps fractions of the blocks, by bytes, away from the compute memory while they are not in use.

    The blocks of each class that are away are spread evenly, so that moving one overlaps with using others.

    Args:
        fraction_of: The fraction that is away, between 0 and 1, of the blocks of a key's class.
        class_of: The class of a key.
        ahead: How many blocks of its class before its own use a block is fetched, by class; 0 fetches it then.
    """

    def __init__(
        self, fraction_of: Mapping[Key, float], class_of: Callable[[Key], Key], ahead: Mapping[Key, int]
    ) -> None:
        self._fraction_of = dict(fraction_of)
        self._class_of = class_of
        self._ahead = dict(ahead)

    def may_stay(self, key: Key, sizes: Mapping[Key, int]) -> bool:
        """Return whether a block is one of those that stay."""
        kind = self._class_of(key)
        fraction = self._fraction_of.get(kind, 0.0)
        before = sum(sizes[other] for other in _until(key, sizes) if self._class_of(other) == kind)
        return not _is_away(before, sizes[key], fraction)

    def plan(self, request: Request) -> Sequence[Moves]:
        """Return moves that bring a block some uses ahead of its own, and send it away when that ends."""
        away = self._away(request.sizes) - request.staying
        evict: dict[int, list[Key]] = defaultdict(list)
        load: dict[int, list[Key]] = defaultdict(list)
        starts = self._starts(request)
        present = set(request.resident)
        has_values = set(request.resident | request.away)
        users: dict[Key, int] = defaultdict(int)
        leaving: dict[Key, int] = {key: 0 for key in request.resident if key in away}
        for index, event in enumerate(request.events):
            key = event.key
            if event.kind is Kind.USE:
                users[key] += 1
                start = starts[index]
                left = leaving.pop(key, None)
                if left is not None and left >= start:
                    continue  # it would come back as soon as it is gone
                if left is not None:
                    evict[left].append(key)
                    present.discard(key)
                if key not in present and key in has_values:
                    load[start].append(key)
                present.add(key)
                has_values.add(key)
            elif event.kind is Kind.RELEASE:
                users[key] -= 1
                if not users[key] and key in away:
                    leaving[key] = index + 1
            elif event.kind is Kind.FORGET:
                leaving.pop(key, None)
                present.discard(key)
                has_values.discard(key)
        for key, index in leaving.items():
            evict[index].append(key)
        return [Moves(tuple(evict[index]), tuple(load[index])) for index in range(len(request.events) + 1)]

    def _starts(self, request: Request) -> dict[int, int]:
        """Return for each use the event at which a block is fetched for it."""
        runs: dict[Key, list[tuple[Key, int]]] = defaultdict(list)
        starts = {}
        for index, event in enumerate(request.events):
            if event.kind is Kind.USE:
                of_class = runs[self._class_of(event.key)]
                # A block's uses in a row, as in a step, are one.
                if not of_class or of_class[-1][0] != event.key:
                    of_class.append((event.key, index))
                ahead = self._ahead.get(self._class_of(event.key), 0)
                starts[index] = of_class[max(0, len(of_class) - 1 - ahead)][1] if ahead else index
        return starts

    def _away(self, sizes: Mapping[Key, int]) -> set[Key]:
        before: dict[Key, int] = defaultdict(int)
        away = set()
        for key, size in sizes.items():
            kind = self._class_of(key)
            if _is_away(before[kind], size, self._fraction_of.get(kind, 0.0)):
                away.add(key)
            before[kind] += size
        return away


def _until(key: Key, sizes: Mapping[Key, int]) -> list[Key]:
    before = []
    for other in sizes:
        if other == key:
            break
        before.append(other)
    return before


def _is_away(bytes_before: int, size: int, fraction: float) -> bool:
    """Whether a block is away: the middles of those that are cut the bytes into even steps."""
    if not size:
        return False
    return int((bytes_before + size) * fraction / size + 0.5) > int(bytes_before * fraction / size + 0.5)
