"""`rehearse`: run split layers for all ranks of a group within one process, without communication.

A rank runs until its first collective, where it stops. Once every rank has stopped there, the result is known, and all
of them run again from the start, up to the second one. So a function with n collectives runs n + 1 times for each rank:
cheap for a layer on a few numbers, and no rank can wait for another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import torch

from booster_core.errors import ConfigError
from booster_hybrid.tensor_parallel.group import TensorGroup
from booster_runtime import collectives

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


@dataclass
class _Script:
    """Results of the collectives that a rank has come past, and where it is among them."""

    results: list[Tensor] = field(default_factory=list)
    position: int = 0


class _StoppedError(BaseException):
    """Stops a rank at a collective whose result is not known; not an `Exception`, which layers may catch."""

    def __init__(self, kind: str, given: Tensor) -> None:
        super().__init__(kind)
        self.kind, self.given = kind, given


@dataclass(frozen=True)
class RehearsedRank(TensorGroup):
    """One rank of a group that exists in a rehearsal only.

    Args:
        group: Always ``None``.
        rank: The rank's index.
        size: Number of ranks.
        script: What the rank's collectives return.
    """

    script: _Script = field(default_factory=_Script, compare=False)

    def all_reduce(self, tensor: Tensor) -> collectives.Pending:
        """Fill in the sum over ranks."""
        tensor.copy_(self._result("all_reduce", tensor))
        return collectives.Pending()

    def all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> collectives.Pending:
        """Fill in the slices of all ranks."""
        own = torch.zeros_like(buffer)  # so that a sum puts the slices together
        own[bounds[self.rank] : bounds[self.rank + 1]] = buffer[bounds[self.rank] : bounds[self.rank + 1]]
        buffer.copy_(self._result("all_gather", own))
        return collectives.Pending()

    def reduce_scatter(self, source: Tensor, bounds: Sequence[int], out: Tensor) -> collectives.Pending:
        """Fill in this rank's slice of the sum over ranks."""
        out.copy_(self._result("reduce_scatter", source)[bounds[self.rank] : bounds[self.rank + 1]])
        return collectives.Pending()

    def _result(self, kind: str, given: Tensor) -> Tensor:
        if self.script.position == len(self.script.results):
            raise _StoppedError(kind, given.clone())
        self.script.position += 1
        return self.script.results[self.script.position - 1]


def rehearse(ranks: Sequence[RehearsedRank], run: Callable[[int], Tensor]) -> list[Tensor]:
    """Run a function for each rank of a group, and return what it gives.

    Args:
        ranks: The ranks, in order; what the function runs was split with them.
        run: Called with the index of a rank, several times; it must be deterministic, and not change its inputs.

    Raises:
        ConfigError: If ranks take part in different collectives, which would wait for each other.
        Exception: What the function raises for any rank.
    """
    for rank in ranks:
        rank.script.results = []
    while True:
        stopped: list[_StoppedError] = []
        results: list[Tensor] = []
        for rank in ranks:
            rank.script.position = 0
            try:
                results.append(run(rank.rank))
            except _StoppedError as stop:
                stopped.append(stop)
        if not stopped:
            return results
        if results or len({(each.kind, each.given.shape) for each in stopped}) > 1:
            _refuse_different_collectives()
        total = stopped[0].given
        for each in stopped[1:]:
            total = total + each.given
        for rank in ranks:
            rank.script.results.append(total)


def _refuse_different_collectives() -> NoReturn:
    msg = "tensor parallel ranks would take part in different collectives"
    raise ConfigError(msg)
