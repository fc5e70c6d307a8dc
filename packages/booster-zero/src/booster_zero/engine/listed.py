"""Which of a model's optimizers steps on which of its parameters, and how these are cut for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_runtime.sharding import is_by_matrix, partition_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor
    from torch.optim import Optimizer


class ListedParameters:
    """The parameters that the groups of a model's optimizers list.

    Args:
        optimizers: The user's optimizers, whose groups list the model's parameters still.
        partition: How parameters are to be cut, see `ShardingOptions`.

    Attributes:
        partitions: How each of the optimizers takes parameters: ``"flat"`` or ``"parameter"``.
        by_matrix: Whether each of them updates matrices by themselves.

    Raises:
        ConfigError: If one of the optimizers can't be sharded.
    """

    def __init__(self, optimizers: Sequence[Optimizer], partition: str) -> None:
        # Parameters that no optimizer lists go with those of the first.
        self.partitions = [partition_for(each, partition) for each in optimizers] or ["flat"]
        self.by_matrix = [is_by_matrix(each) for each in optimizers] or [False]
        self._number_of: dict[int, int] = {}
        for number, each in enumerate(optimizers):
            for group in each.param_groups:
                self.add(group["params"], number)

    def add(self, parameters: Iterable[Tensor], number: int) -> None:
        """Count parameters as those of the optimizer with a number."""
        self._number_of.update((id(parameter), number) for parameter in parameters)

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._number_of

    def number_of(self, parameter: Tensor) -> int:
        """Return which optimizer steps on a parameter."""
        return self._number_of.get(id(parameter), 0)
