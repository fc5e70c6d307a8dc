"""`GeminiEngine`: chunks whose buffers are in several memories."""

from __future__ import annotations

from typing import Any

from booster_core.errors import BudgetError
from booster_zero.engine import ShardedEngine


class GeminiEngine(ShardedEngine):
    """Keeps the parameters of a model in chunks.

    Args:
        *args: As for `ShardedEngine`.
        chosen: Numbers of the parameters in leaves, of which each rank may use others. They are reduced when backward
            has ended: ranks would come to their reductions at different times among their gathers.
        **kwargs: As for `ShardedEngine`.

    Raises:
        ConfigError: If a parameter is of a kind that can't be sharded.

    Collective: every rank of the world.
    """

    def __init__(self, *args: Any, chosen: set[int], **kwargs: Any) -> None:
        self._chosen = chosen
        self._has_stepped = False
        super().__init__(*args, **kwargs)
        self.reducer.repeated = {*chosen}

    def agree_on_record(self, order: list[int], late: set[int]) -> set[int]:
        """Let ranks agree on what the first round has shown; see `ShardedEngine.agree_on_record`.

        Collective: every rank of the world.
        """
        return super().agree_on_record(order, late) | self._chosen

    def end_step(self) -> None:
        """Raise on every rank what went wrong on any apart from the step itself, which is complete.

        The first step does not tell how much a budget must hold.

        Collective: every rank of the world, where blocks move; else none.
        """
        shortage: Exception | None = None
        try:
            self.memory.end_step()
        except BudgetError as caught:
            shortage = caught if self._has_stepped else None
        self._has_stepped = True
        self.raise_together(self.memory.problem() or shortage)
