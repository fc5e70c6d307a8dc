"""`GeminiEngine`: chunks whose buffers are in several memories."""

from __future__ import annotations

from typing import Any

from booster_core.errors import ConfigError
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
        super().__init__(*args, **kwargs)
        self.reducer.repeated = {*chosen}

    def agree_on_record(self, order: list[int], late: set[int]) -> set[int]:
        """Lay the chunks out by what the first round has shown; see `ShardedEngine.agree_on_record`.

        Raises:
            ConfigError: If other ranks still use parameters.

        Collective: every rank of the world.
        """
        return super().agree_on_record(order, late) | self._chosen

    def end_step(self) -> None:
        """Raise on every rank what went wrong on any apart from the step itself, which is complete.

        Where a budget does not hold what is gathered ahead of its use, nothing is gathered ahead from now on. A step in
        which chunks were laid out again does not tell how much is needed.

        Collective: every rank of the world, where blocks move; else none.
        """
        shortage: ConfigError | None = None
        try:
            self.memory.end_step()
        except ConfigError as caught:
            shortage = caught
        problem: Exception | None = self.memory.problem()
        gatherer = self.gatherer
        if self.is_anywhere(shortage) and not gatherer.stop_looking_ahead() and not gatherer.is_laid_out_again:
            problem = problem or shortage
        gatherer.is_laid_out_again = False
        self.raise_together(problem)
