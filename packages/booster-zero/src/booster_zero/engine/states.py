"""How long a bucket keeps its whole values, and the states of those and of a round of reductions."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class _State(enum.Enum):
    """A state. Looking it up in a table calls no Python, which the hash of an `enum.Enum` is."""

    __hash__ = object.__hash__


class Keep(enum.Enum):
    """How long a rank keeps the whole values of a bucket."""

    ALWAYS = "always"
    """ZeRO stages 1 and 2: updates are gathered into the parameters after each step."""
    UNTIL_STEP = "until the step"
    """From the first use to the next step."""
    IN_USE = "while in use"
    """ZeRO stage 3: gathered before each use, released after it."""


class WholeState(_State):
    """What a rank has of a bucket's whole values."""

    SHARDED = "sharded"
    """Its own slice alone: parameters are absent."""
    ARRIVING = "arriving"
    """A buffer with all of them, here or on its way; parameters are absent."""
    GATHERED = "gathered"
    """All, to be used: parameters are views of it."""


TRANSITIONS: dict[WholeState, frozenset[WholeState]] = {
    WholeState.SHARDED: frozenset({WholeState.ARRIVING}),
    WholeState.ARRIVING: frozenset({WholeState.GATHERED, WholeState.SHARDED}),
    WholeState.GATHERED: frozenset({WholeState.ARRIVING, WholeState.SHARDED}),
}
"""Where each state may lead. A gather that failed leads back to the beginning."""


class RoundState(_State):
    """How far the backward has come whose gradients are being reduced."""

    IDLE = "idle"
    """None runs, and none has left reductions that other ranks wait for."""
    OPEN = "open"
    """One runs that `Reducer.guarded` has begun, or has ended without waiting for its reductions."""
    DIRECT = "direct"
    """One runs that the script has called itself; if it raises, nobody tells."""
    BROKEN = "broken"
    """One has raised: its reductions are finished before anything else."""


ROUND_TRANSITIONS: dict[RoundState, frozenset[RoundState]] = {
    RoundState.IDLE: frozenset({RoundState.OPEN, RoundState.DIRECT}),
    RoundState.OPEN: frozenset({RoundState.IDLE, RoundState.BROKEN}),
    RoundState.DIRECT: frozenset({RoundState.IDLE}),
    RoundState.BROKEN: frozenset({RoundState.IDLE}),
}
"""Where each state of a round may lead."""

_TABLE: Mapping[Any, frozenset[Any]] = {**TRANSITIONS, **ROUND_TRANSITIONS}


def check_transition(before: _State, after: _State) -> None:
    """Check that a bucket or a round may go from one state to another.

    Raises:
        RuntimeError: If the tables have no such transition, which is an error in this package.
    """
    allowed = _TABLE[before]
    if after not in allowed:
        told = ", ".join(sorted(state.value for state in allowed))
        what = type(before).__name__.removesuffix("State").lower()
        msg = f"A {what} that is {before.value} can't become {after.value}; it can become {told}."
        raise RuntimeError(msg)
