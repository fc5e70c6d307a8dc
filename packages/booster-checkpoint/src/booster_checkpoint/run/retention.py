"""Which steps of a run stay: the last ones, multiples of a number, and the best."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Rules for steps up to the one that is saved; a step that any of them keeps stays.

    Args:
        keep_last: Keep this many steps.
        keep_every: Keep multiples of this.
        keep_best: Keep this many steps with the smallest metric.

    Raises:
        ConfigError: If one of them is no positive number.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                msg = f"`{name}={value!r}` is not a number of steps. Use 1 or more, or None."
                raise ConfigError(msg)

    @property
    def keeps_all(self) -> bool:
        """Whether there is no rule."""
        return self.keep_last is self.keep_every is self.keep_best is None

    def kept(self, steps: Collection[int], metrics: Mapping[int, float]) -> set[int]:
        """Return the steps that stay.

        Args:
            steps: The steps, up to the one that was saved, which always stays.
            metrics: The metric of each step that has one; not a number is worse than any.
        """
        if self.keeps_all or not steps:
            return set(steps)
        kept = {max(steps)}
        if self.keep_last is not None:
            kept.update(sorted(steps)[-self.keep_last :])
        if self.keep_every is not None:
            kept.update(step for step in steps if step % self.keep_every == 0)
        if self.keep_best is not None:
            rated = [step for step in steps if step in metrics]
            rated.sort(key=lambda step: (math.isnan(metrics[step]), metrics[step], -step))
            kept.update(rated[: self.keep_best])
        return kept
