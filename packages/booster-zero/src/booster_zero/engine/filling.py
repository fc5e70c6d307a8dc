"""How far buckets have come in the present round of reductions: `Filling` of one, and `Round` of all."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from booster_zero.engine.bucket import Bucket


@dataclass(eq=False, slots=True)
class Filling:
    """How far a bucket has come in the present round.

    Attributes:
        missing: Number of gradients that are awaited.
        waits_for_end: Whether the bucket is reduced at the end of the round only.
        gradients: The gradients that have come, flat and in the format that travels, by parameter.
        taken: The parameters that none is awaited of any more.
        is_started: Whether the bucket is being reduced.
    """

    missing: int = 0
    waits_for_end: bool = False
    gradients: dict[int, Tensor] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    is_started: bool = False

    def leave_out(self, index: int) -> None:
        """Await no gradient of a trained parameter."""
        if index not in self.taken:
            self.taken.add(index)
            self.missing -= 1


class Round:
    """The fillings of one round, in the order in which their buckets are reduced.

    A gradient asks for the first bucket that is not reduced yet, and not for all of them: there may be thousands.

    Args:
        fillings: Each bucket's.

    Attributes:
        fillings: The same by bucket; one that is not among them takes no part.
    """

    def __init__(self, fillings: Iterable[tuple[Bucket, Filling]] = ()) -> None:
        self.fillings = dict(fillings)
        self._waiting = deque(self.fillings.items())

    def add(self, bucket: Bucket, filling: Filling) -> None:
        """Let a bucket take part that has trained parameters only now; it comes last."""
        self.fillings[bucket] = filling
        self._waiting.append((bucket, filling))

    def take_complete(self) -> Iterator[tuple[Bucket, Filling]]:
        """Yield the buckets that can be reduced now; whoever calls this starts each of them before the next."""
        while self._waiting:
            bucket, filling = self._waiting[0]
            if filling.missing > 0 or filling.waits_for_end:
                return
            self._waiting.popleft()
            yield bucket, filling

    def take_rest(self) -> Iterator[tuple[Bucket, Filling]]:
        """Yield all other buckets, as above."""
        while self._waiting:
            yield self._waiting.popleft()
