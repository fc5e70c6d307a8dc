"""`Tracker`: what receives the values of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Tracker(ABC):
    """Receives the values of each step, on the master rank only."""

    @abstractmethod
    def start(self, step: int) -> None:
        """Begin, or go on, after a step; what was received for later steps of an interrupted run is dropped."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Receive the values of a step. Steps come in ascending order, each once."""

    @abstractmethod
    def close(self) -> None:
        """Write what is not written yet; called once, also after an error."""
