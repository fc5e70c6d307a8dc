"""Bytes by kind in the memory that computes and in other memories, at each column of a picture."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from booster_gemini.pictures.reading import MOVING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from booster_gemini.pictures.reading import Level, Record, Step

ROLES = ("param", "grad", "optim")
GATHERED = "gathered"
OTHER = "other"


@dataclass
class Sample:
    """What was where at a moment.

    Attributes:
        seconds: The moment, from the beginning of the step.
        here: Bytes in the memory that computes: by role, `GATHERED` for whole parameters, `OTHER` for activations
            and the like.
        elsewhere: Bytes in other memories, by place and role.
    """

    seconds: float
    here: dict[str, int] = field(default_factory=dict)
    elsewhere: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """All bytes in the memory that computes."""
        return sum(self.here.values())


def least_of_process(record: Record) -> int:
    """Return what a process has besides blocks when it has least: programs, and what is no activation."""
    levels = [level for step in record.steps for level in step.levels if level.process]
    return min((level.process - level.held for level in levels), default=0)


def samples(step: Step, device: str, least: int) -> list[Sample]:
    """Return what was where at each moment of a step at which something changed.

    Args:
        step: The step.
        device: Type of the device that computes.
        least: As `least_of_process` tells.
    """
    changes: list[tuple[float, int, str, str, int]] = []
    for stay in step.stays:
        if stay.end > stay.start:
            changes.append((stay.start, 1, stay.place, stay.role, stay.num_bytes))
            changes.append((stay.end, 0, stay.place, stay.role, -stay.num_bytes))
    changes.sort()
    moments = sorted({change[0] for change in changes} | {level.seconds for level in step.levels} | {step.start})
    here = dict.fromkeys(ROLES, 0)
    elsewhere: dict[tuple[str, str], int] = {}
    position = 0
    found: list[Sample] = []
    starts = [level.seconds for level in step.levels]
    for moment in moments:
        while position < len(changes) and changes[position][0] <= moment:
            _, _, place, role, num_bytes = changes[position]
            position += 1
            if place == device or place in MOVING:
                here[role] += num_bytes
            else:
                elsewhere[place, role] = elsewhere.get((place, role), 0) + num_bytes
        if moment >= step.end and found:
            break
        known = bisect_right(starts, moment) - 1
        level = step.levels[known] if known >= 0 else None
        found.append(Sample(max(moment - step.start, 0.0), {**here, **_rest(here, level, least)}, dict(elsewhere)))
    return found


def _rest(here: dict[str, int], level: Level | None, least: int) -> dict[str, int]:
    if level is None:
        return {GATHERED: 0, OTHER: 0}
    other = max(level.process - level.held - least, 0) if level.process else 0
    return {GATHERED: max(level.used - sum(here.values()), 0), OTHER: other}


def columns(found: Sequence[Sample], seconds: float, number: int) -> Iterator[Sample]:
    """Yield one sample for each column of a picture: the highest of those within, or the last one before."""
    position, last = 0, found[0] if found else Sample(0.0)
    for column in range(number):
        end = seconds * (column + 1) / number
        within = []
        while position < len(found) and found[position].seconds < end:
            within.append(found[position])
            position += 1
        yield max(within, key=lambda sample: sample.total, default=last)
        last = within[-1] if within else last
