"""torchft's `Manager`, which lets a group do something of its own after each quorum."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torchft import Manager

if TYPE_CHECKING:
    from collections.abc import Callable


class GroupManager(Manager):  # type: ignore[misc] # torchft has no types
    """A manager whose received state is taken by all ranks of the group together, after the quorum.

    torchft hands each rank what it has received, also where another rank of the group has received nothing.

    Args:
        on_quorum: Called with this manager and its own state before the quorum; returns whether the quorum counts, or
            another one is asked for.
        no_quorum: Returns what to raise in place of an error of the quorum.
        state_dict: Returns what a group that is behind receives.
        **options: As for torchft's manager.
    """

    def __init__(
        self,
        *,
        on_quorum: Callable[[GroupManager, dict[str, int]], bool],
        no_quorum: Callable[[Exception], Exception],
        state_dict: Callable[[], dict[str, Any]],
        **options: Any,
    ) -> None:
        self._on_quorum, self._no_quorum, self._taken = on_quorum, no_quorum, None
        super().__init__(load_state_dict=self._take, state_dict=state_dict, **options)

    def start_quorum(self, *arguments: Any, **options: Any) -> None:
        """Wait for the quorum of the next step, and for what follows it."""
        counts = False
        while not counts:
            before = self.state_dict()
            self._taken = None
            try:
                with warnings.catch_warnings():
                    # Of torchft itself, which takes a warning that raises for an error of the connection.
                    warnings.simplefilter("ignore")
                    super().start_quorum(*arguments, **options)
            except Exception as error:
                raise self._no_quorum(error) from error
            counts = self._on_quorum(self, before)

    def take_received(self) -> Any:
        """Return the state that came with the last quorum, once; ``None`` where none did."""
        taken, self._taken = self._taken, None
        return taken

    def _take(self, received: Any) -> None:
        self._taken = received
