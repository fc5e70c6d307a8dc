"""The life cycle of a chunk's whole: an enum and the table of its transitions."""

from __future__ import annotations

import enum


class ChunkState(enum.Enum):
    """What there is of a chunk on this rank besides its own slice."""

    SHARDED = "sharded"
    """Nothing: parameters are placeholders."""
    GATHERING = "gathering"
    """A buffer that the other ranks' slices are arriving in; parameters are placeholders."""
    GATHERED = "gathered"
    """The whole; parameters are views of it."""


TRANSITIONS: dict[ChunkState, frozenset[ChunkState]] = {
    ChunkState.SHARDED: frozenset({ChunkState.GATHERING}),
    ChunkState.GATHERING: frozenset({ChunkState.GATHERED, ChunkState.SHARDED}),
    ChunkState.GATHERED: frozenset({ChunkState.SHARDED}),
}
"""Where each state may lead. A gather that failed leads back to the beginning."""


def check_transition(before: ChunkState, after: ChunkState) -> None:
    """Check that a chunk may go from one state to another.

    Raises:
        RuntimeError: If the table has no such transition, which is an error in this package.
    """
    if after not in TRANSITIONS[before]:
        allowed = ", ".join(sorted(state.value for state in TRANSITIONS[before]))
        msg = f"A chunk that is {before.value} can't become {after.value}; it can become {allowed}."
        raise RuntimeError(msg)
