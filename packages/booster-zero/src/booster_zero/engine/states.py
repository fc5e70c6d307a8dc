"""How long a bucket keeps its whole values, and the two lives of a bucket: of its values, and of its gradient."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class Keep(enum.Enum):
    """How long a rank keeps the whole values of a bucket."""

    ALWAYS = "always"
    """ZeRO stages 1 and 2: updates are gathered into the parameters after each step."""
    UNTIL_STEP = "until the step"
    """From the first use to the next step."""
    IN_USE = "while in use"
    """ZeRO stage 3: gathered before each use, released after it."""


class WholeState(enum.Enum):
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


class GradientState(enum.Enum):
    """What a rank has of its part of a bucket's gradient."""

    NONE = "none"
    """Nothing; memory of an earlier one may be kept."""
    REDUCING = "being reduced"
    """A sum over the ranks that share the bucket is on its way; an earlier one may be there, to which it is added."""
    SUMMED = "summed"
    """Sums over these ranks, which the replicas of the shard may have to average."""
    AVERAGED = "averaged"
    """What the optimizer steps with, but for what was added since."""


GRADIENT_TRANSITIONS: dict[GradientState, frozenset[GradientState]] = {
    GradientState.NONE: frozenset({GradientState.REDUCING, GradientState.SUMMED, GradientState.AVERAGED}),
    GradientState.REDUCING: frozenset({GradientState.SUMMED, GradientState.AVERAGED, GradientState.NONE}),
    GradientState.SUMMED: frozenset({GradientState.REDUCING, GradientState.AVERAGED, GradientState.NONE}),
    GradientState.AVERAGED: frozenset({GradientState.REDUCING, GradientState.SUMMED, GradientState.NONE}),
}
"""Where each state of a gradient may lead. A reduction that failed leads to none."""


def check_transition(before: WholeState | GradientState, after: WholeState | GradientState) -> None:
    """Check that a bucket, or its gradient, may go from one state to another.

    Raises:
        RuntimeError: If the tables have no such transition, which is an error in this package.
    """
    table: Mapping[Any, frozenset[Any]] = TRANSITIONS if isinstance(before, WholeState) else GRADIENT_TRANSITIONS
    if after not in table[before]:
        allowed = ", ".join(sorted(state.value for state in table[before]))
        what = "bucket" if isinstance(before, WholeState) else "gradient"
        msg = f"A {what} that is {before.value} can't become {after.value}; it can become {allowed}."
        raise RuntimeError(msg)
