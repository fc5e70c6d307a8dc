"""What a verification found: how far each tensor of a boosted run is from that of one process."""

from __future__ import annotations

import math
from dataclasses import dataclass

from booster_core.errors import GradientError

_MOST_LISTED = 20


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far one tensor is from the reference.

    Args:
        what: ``"initial parameter"``, ``"output"``, ``"evaluation loss"``, ``"loss"``, ``"gradient"``, ``"update"`` or
            ``"update of a master"``.
        step: Number of the training step, from 1; 0 before training.
        name: The parameter's name in the user's model, or the path of an output.
        error: L2 norm of the difference, as a fraction of the reference's norm. Infinite where only one of the two
            exists or a value is not finite.
        tolerance: The largest error that rounding explains in the run's precision.
    """

    what: str
    step: int
    name: str
    error: float
    tolerance: float

    @property
    def is_explained(self) -> bool:
        """Whether rounding explains the difference."""
        return self.error <= self.tolerance

    def __str__(self) -> str:
        """Say it in one line."""
        where = f" at step {self.step}" if self.step else ""
        subject = f"{self.what} '{self.name}'" if self.name else self.what
        if math.isinf(self.error):
            return f"{subject}{where}: absent on one side, of another shape, or not finite"
        return f"{subject}{where}: {self.error:.3g} of its norm, tolerance {self.tolerance:g}"


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of `verify`, the same on every rank.

    Args:
        plugin: Name of the plugin.
        world_size: Number of ranks.
        differences: Everything that was compared, in order of time; the largest error over all ranks of each.
        seconds: How long the verification took.
    """

    plugin: str
    world_size: int
    differences: tuple[Difference, ...]
    seconds: float

    @property
    def unexplained(self) -> tuple[Difference, ...]:
        """The differences beyond rounding: those of the earliest kind and step first, and of these the largest."""
        order = {(found.step, found.what): index for index, found in reversed(list(enumerate(self.differences)))}
        beyond = [found for found in self.differences if not found.is_explained]
        return tuple(sorted(beyond, key=lambda found: (order[found.step, found.what], -found.error)))

    @property
    def not_compared(self) -> tuple[str, ...]:
        """The parameters whose updates say nothing, as their gradients are rounding errors of larger ones."""
        updated = {found.name for found in self.differences if found.what == "update"}
        named = (found.name for found in self.differences if found.what == "initial parameter")
        return tuple(name for name in named if name not in updated)

    def check(self) -> None:
        """Raise if the boosted run differs from one process by more than rounding.

        Raises:
            GradientError: With a ranked list of what differs.

        Collective: none; raises on every rank or on none.
        """
        if self.unexplained:
            raise GradientError(str(self))

    def __str__(self) -> str:
        """Return a summary, with a ranked list of what differs beyond rounding."""
        run = f"plugin '{self.plugin}' on {self.world_size} rank(s)"
        beyond = self.unexplained
        if not beyond:
            worst = max(
                self.differences, key=lambda found: found.error / max(found.tolerance, math.ulp(0.0)), default=None
            )
            nearest = f"; nearest to its tolerance: {worst}" if worst and worst.error else ""
            return (
                f"Verified in {self.seconds:.1f} s: {run} trains as one process does "
                f"({len(self.differences)} comparisons{nearest}).{self._left_out()}"
            )
        share = f"{len(beyond)} of {len(self.differences)} comparisons"
        lines = [f"{run[0].upper()}{run[1:]} differs from one process in {share}:"]
        lines += [f"  {found}" for found in beyond[:_MOST_LISTED]]
        if len(beyond) > _MOST_LISTED:
            lines.append(f"  and {len(beyond) - _MOST_LISTED} more")
        return "\n".join(lines) + self._left_out()

    def _left_out(self) -> str:
        names = self.not_compared
        if not names:
            return ""
        more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
        return (
            "\nNot compared: updates of parameters whose gradients are rounding errors of larger ones: "
            f"{', '.join(repr(name) for name in names[:_MOST_LISTED])}{more}."
        )
