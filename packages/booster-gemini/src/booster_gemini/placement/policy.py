"""What a placement policy is told and what it answers: a recorded step in, moves between memories out.

A policy sees a step as a list of events, in terms of blocks that have a key and a size. It knows nothing of tensors,
files or ranks, so that it is tested without any. A third party's policy comes through the hook ``placement_policy``.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Key = Any
"""Names a block: anything hashable; policies only compare keys."""


class Kind(enum.Enum):
    """What happens at an event."""

    USE = "use"
    """A block is needed in the memory where it is computed with, until the release that belongs to this use."""
    RELEASE = "release"
    """A use of a block ends."""
    FORGET = "forget"
    """A block's values are not needed any more: it takes no memory until its next use, which begins without values."""
    RESERVE = "reserve"
    """Memory is taken for something that is not a block, such as a gathered chunk."""
    FREE = "free"
    """Reserved memory is given back."""


@dataclass(frozen=True)
class Event:
    """One event of a step.

    Args:
        kind: What happens.
        key: The block; ``None`` for reserved memory.
        num_bytes: Size of reserved memory; 0 for a block.
        moment: What the model is doing, such as a module's name; for messages and pictures.
    """

    kind: Kind
    key: Key | None = None
    num_bytes: int = 0
    moment: str = ""

    def is_like(self, other: Event) -> bool:
        """Whether two events are the same but for what the model is doing."""
        return (self.kind, self.key, self.num_bytes) == (other.kind, other.key, other.num_bytes)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a plan is asked for.

    Args:
        events: A step, as recorded; the next one is expected to be the same.
        sizes: Size of every block, in bytes.
        resident: The blocks that are in the compute memory when the step begins.
        away: The blocks that have values in another memory.
        budget_bytes: What blocks and reserved memory may take together at each event; ``None`` for no limit.
        staying: The blocks that `PlacementPolicy.may_stay` has let stay for good, as an optimizer's state that is
            stepped on where it is; a budget may move them all the same.
    """

    events: Sequence[Event]
    sizes: Mapping[Key, int]
    resident: frozenset[Key]
    away: frozenset[Key] = frozenset()
    budget_bytes: Sequence[int] | None = None
    staying: frozenset[Key] = frozenset()


@dataclass(frozen=True)
class Moves:
    """What is started before an event: first blocks leave, then others come.

    Args:
        evict: Blocks that leave the compute memory.
        load: Blocks that are brought into it.
    """

    evict: tuple[Key, ...] = ()
    load: tuple[Key, ...] = ()


class PlacementPolicy(ABC):
    """Decides which blocks are in the compute memory, and when they come and go."""

    @abstractmethod
    def plan(self, request: Request) -> Sequence[Moves]:
        """Return what to move before each event of the step, and what after the last: one entry more than events.

        A block that is needed and not there is fetched then, without a plan; a plan only makes that rare.

        Raises:
            BudgetError: If the budget can't hold what is in use at once.
        """

    @abstractmethod
    def may_stay(self, key: Key, sizes: Mapping[Key, int]) -> bool:
        """Return whether a block that is not in use may stay in the compute memory while no plan is known.

        Args:
            key: The block.
            sizes: Sizes of all blocks so far, in the order in which they were added.
        """


@dataclass(frozen=True)
class WorkingSet:
    """The most that is in use at once in a step.

    Args:
        num_bytes: Blocks in use and reserved memory.
        moment: What the model was doing then.
    """

    num_bytes: int
    moment: str


def largest_working_set(events: Sequence[Event], sizes: Mapping[Key, int]) -> WorkingSet:
    """Return the largest number of bytes that must be in the compute memory at once during a step."""
    users: dict[Key, int] = {}
    now = 0
    largest = WorkingSet(0, "")
    for event in events:
        now += event_bytes(event, users, sizes)
        if now > largest.num_bytes:
            largest = WorkingSet(now, event.moment)
    return largest


def event_bytes(event: Event, users: dict[Key, int], sizes: Mapping[Key, int]) -> int:
    """Return by how much an event changes the bytes in use, and count the users of its block."""
    if event.kind is Kind.RESERVE:
        return event.num_bytes
    if event.kind is Kind.FREE:
        return -event.num_bytes
    if event.kind is Kind.USE:
        users[event.key] = users.get(event.key, 0) + 1
        return sizes[event.key] if users[event.key] == 1 else 0
    if event.kind is Kind.RELEASE:
        users[event.key] = users.get(event.key, 0) - 1
        return 0 if users[event.key] else -sizes[event.key]
    return 0
