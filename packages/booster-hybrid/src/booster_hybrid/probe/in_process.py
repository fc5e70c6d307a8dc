"""`on_ranks`: run split layers for all ranks of a group within one process, without communication.

A rank runs until its first collective, where it stops. Once every rank has stopped there, the result is known, and all
of them run again from the start, up to the second one. So a function with n collectives runs n + 1 times for each rank:
cheap for a layer on a few numbers, and no rank can wait for another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from booster_core.errors import ConfigError
from booster_hybrid.rank_group import RankGroup
from booster_runtime import collectives

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

T = TypeVar("T")


@dataclass
class _Script:
    """Results of the collectives that a rank has come past, and where it is among them."""

    results: list[Tensor] = field(default_factory=list)
    position: int = 0
    stopped: _StoppedError | None = None


class _StoppedError(BaseException):
    """Stops a rank at a collective whose result is not known; not an `Exception`, which layers may catch."""

    def __init__(self, kind: str, given: Tensor, bounds: Sequence[int] = ()) -> None:
        super().__init__(kind)
        self.kind, self.given, self.bounds = kind, given, tuple(bounds)

    @property
    def call(self) -> tuple[str, torch.Size | None]:
        """What all ranks have to agree on."""
        return self.kind, None if self.kind == "all_to_all" else self.given.shape


@dataclass(frozen=True)
class InProcessRank(RankGroup):
    """One rank of a group that exists within this process only.

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

    def all_to_all(
        self, source: Tensor, sent: Sequence[int], out: Tensor, received: Sequence[int]
    ) -> collectives.Pending:
        """Fill in the slices that the ranks send here."""
        result = self._result("all_to_all", source, sent)
        out[received[0] : received[-1]].copy_(result)
        return collectives.Pending()

    def _result(self, kind: str, given: Tensor, bounds: Sequence[int] = ()) -> Tensor:
        script = self.script
        if script.position == len(script.results):
            with _disable_current_modes():  # selective checkpointing would expect the copy in the recomputation
                script.stopped = _StoppedError(kind, given.detach().clone(), bounds)
            raise script.stopped
        script.position += 1
        return script.results[script.position - 1]


def on_ranks(size: int, run: Callable[[InProcessRank], T]) -> list[T]:
    """Run a function for every rank of a group within this process, and return what it gives.

    Args:
        size: Number of ranks.
        run: Called with a rank, several times; it must be deterministic, and not change its inputs.

    Raises:
        ConfigError: If ranks take part in different collectives, which would wait for each other.
        Exception: What the function raises for any rank.
    """
    ranks = [InProcessRank(None, rank, size) for rank in range(size)]
    while True:
        results = []
        for rank in ranks:
            rank.script.position, rank.script.stopped = 0, None
            try:
                results.append(run(rank))
            except _StoppedError as stop:
                stop.__traceback__ = None  # its frames hold all that the run has made
                continue
            if rank.script.stopped is not None:
                msg = "a layer catches `BaseException`, so that it can't be stopped where ranks would wait"
                raise ConfigError(msg)
        stopped = [rank.script.stopped for rank in ranks if rank.script.stopped is not None]
        if not stopped:
            return results
        if results or len({each.call for each in stopped}) > 1:
            _refuse_different_collectives()
        for rank, result in zip(ranks, _answers(stopped), strict=True):
            rank.script.results.append(result)


def _answers(stopped: Sequence[_StoppedError]) -> list[Tensor]:
    """Return what a collective gives to each rank."""
    if stopped[0].kind == "all_to_all":
        return [
            torch.cat([each.given[each.bounds[rank] : each.bounds[rank + 1]] for each in stopped])
            for rank in range(len(stopped))
        ]
    total = stopped[0].given
    for each in stopped[1:]:
        total = total + each.given
    return [total] * len(stopped)


def _refuse_different_collectives() -> NoReturn:
    msg = "ranks would take part in different collectives"
    raise ConfigError(msg)
