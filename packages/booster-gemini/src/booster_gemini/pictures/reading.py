"""Reading a rank's record: the steps of a run, and in each what was where from when to when."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

NOWHERE = "nowhere"
"""The place of a block without values."""

MOVING = ("coming", "leaving")
"""The places of blocks on their way: they take room in the memory that computes, too."""


@dataclass(frozen=True)
class Stay:
    """A block in one place.

    Args:
        chunk: Number of its chunk.
        role: What it holds of the chunk: ``"param"``, ``"grad"`` or ``"optim"``.
        place: A device's type, ``"disk"``, or one of `MOVING`.
        num_bytes: Its size.
        start: From when, in seconds of the record.
        end: Until when.
    """

    chunk: int
    role: str
    place: str
    num_bytes: int
    start: float
    end: float


@dataclass(frozen=True)
class Level:
    """How much of the memory that computes was taken, from a moment on.

    Args:
        seconds: The moment.
        used: Bytes of blocks and gathered chunks.
        held: What is allocated for them.
        process: What the process has, ours and others'; 0 where it is not known.
    """

    seconds: float
    used: int
    held: int
    process: int


@dataclass
class Step:
    """One step.

    Attributes:
        number: Which, from 0.
        start: When the model began to do something, in seconds of the record.
        end: When it ended.
        unplanned: How many events the plan had not foreseen.
        stays: Where blocks were.
        levels: How much was taken.
        moments: What the model did, from when on.
    """

    number: int
    start: float
    end: float = 0.0
    unplanned: int = 0
    stays: list[Stay] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)
    moments: list[tuple[float, str]] = field(default_factory=list)

    def uses(self) -> list[tuple[float, float, str]]:
        """Return from when to when the model did what."""
        ends = [start for start, _ in [*self.moments, (self.end, "")][1:]]
        return [(start, end, name) for (start, name), end in zip(self.moments, ends, strict=True)]

    def phases(self) -> list[tuple[float, float, str]]:
        """Return from when to when the step went forward, backward, and stepped."""
        found: list[tuple[float, float, str]] = []
        for start, end, name in self.uses():
            phase = name if name in ("backward", "step") else "forward"
            if found and found[-1][2] == phase:
                start = found.pop()[0]  # noqa: PLW2901 - the same phase goes on
            found.append((start, end, phase))
        return found


@dataclass
class Record:
    """What a rank wrote.

    Attributes:
        facts: Rank, device, budget and policy.
        steps: Those that ended.
    """

    facts: dict[str, Any]
    steps: list[Step]


def read_records(folder: Path) -> list[Record]:
    """Return the records in a folder, by rank.

    Raises:
        ConfigError: If there is none, or one can't be read.
    """
    paths = sorted(folder.glob("memory-rank*.jsonl"), key=lambda path: (len(path.name), path.name))
    if not paths:
        msg = (
            f"'{folder}' holds no memory-rank*.jsonl. Name the folder that was given as "
            "`GeminiPlugin(memory_record=...)`, after at least one step."
        )
        raise ConfigError(msg)
    return [_read(path) for path in paths]


def _read(path: Path) -> Record:
    reader = _Reader()
    facts: dict[str, Any] = {}
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            if entry["kind"] == "start":
                facts = entry
            else:
                reader.take(entry)
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break  # cut short when the process was ended
            msg = f"Line {number} of '{path}' is no entry of a memory record: {type(error).__name__}: {error}."
            raise ConfigError(msg) from error
    return Record(facts, reader.steps)


class _Reader:
    """Takes entries in their order."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._present = Step(0, 0.0)
        self._places: dict[tuple[int, str], tuple[str, int, float]] = {}

    def take(self, entry: dict[str, Any]) -> None:
        now, kind = float(entry["seconds"]), entry["kind"]
        if kind == "moment":
            self._present.moments.append((now, entry["name"]))
        elif kind == "bytes":
            self._present.levels.append(Level(now, entry["used"], entry["held"], entry["process"]))
        elif kind == "block":
            key = (entry["chunk"], entry["role"])
            self._end_stay(key, now)
            if entry["place"] != NOWHERE:
                self._places[key] = (entry["place"], entry["bytes"], now)
        elif kind == "step":
            self._end_step(entry, now)

    def _end_stay(self, key: tuple[int, str], now: float) -> None:
        known = self._places.pop(key, None)
        if known is not None:
            place, num_bytes, start = known
            self._present.stays.append(Stay(*key, place, num_bytes, max(start, self._present.start), now))

    def _end_step(self, entry: dict[str, Any], now: float) -> None:
        for key, (place, num_bytes, start) in self._places.items():
            self._present.stays.append(Stay(*key, place, num_bytes, max(start, self._present.start), now))
        self._present.end, self._present.unplanned = now, entry["unplanned"]
        self.steps.append(_from_first_moment(self._present))
        self._present = Step(entry["step"] + 1, now, levels=self._present.levels[-1:])


def _from_first_moment(step: Step) -> Step:
    """Return a step without what came before the model did something: loading data, waiting for others."""
    begin = step.moments[0][0] if step.moments else step.start
    before = [level for level in step.levels if level.seconds <= begin]
    return replace(
        step,
        start=begin,
        stays=[replace(stay, start=max(stay.start, begin)) for stay in step.stays if stay.end > begin],
        levels=[*before[-1:], *(level for level in step.levels if level.seconds > begin)],
    )
