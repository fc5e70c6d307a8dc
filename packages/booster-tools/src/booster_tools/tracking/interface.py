"""`Tracker`: what receives the values of a run, and `Meter`: what adds some to each step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class Tracker(ABC):
    """Receives the values of each step, on the master rank only."""

    @abstractmethod
    def start(self, step: int) -> None:
        """Begin, or go on, after a step; what was received for later steps of an interrupted run is dropped."""

    def configure(self, config: Mapping[str, Any]) -> None:  # noqa: B027 - few trackers have a place for settings
        """Receive the settings of the run, after `start`; a tracker without a place for them drops them."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Receive the values of a step. Steps come in ascending order, each once."""

    @abstractmethod
    def close(self) -> None:
        """Write what is not written yet; called once, also after an error."""


class Meter(ABC):
    """Measures each step on every rank; the master rank's values go to trackers."""

    def start(self) -> None:  # noqa: B027 - optional
        """Begin to measure; called where the block of `track` begins."""

    def stop(self) -> None:  # noqa: B027 - optional
        """End measuring; called once, also after an error."""

    @abstractmethod
    def measure(self, seconds: float, metrics: Mapping[str, Any]) -> Mapping[str, float | Tensor]:
        """Return values of the step that ended, by name.

        Args:
            seconds: Time since the step before.
            metrics: As for the hook ``after_step``.

        Collective: none; called on every rank, in step.
        """
