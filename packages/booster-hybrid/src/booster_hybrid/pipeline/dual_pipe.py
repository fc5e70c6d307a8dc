"""The order in which a rank works under DualPipe-V: one half of DualPipe, whose two directions are folded into a V.

References: DeepSeek-AI 2024, "DeepSeek-V3" (arXiv:2412.19437), section 3.2.1; Sea AI Lab 2025, "DualPipe could be
better without the Dual", for the fold. Here gradients of inputs come before a forward that is paired with them, so that
no more activations are kept than by the zero-bubble V; weight gradients follow at once but for the last ones.
"""

from __future__ import annotations

from collections import Counter, deque

FORWARD, INPUT, WEIGHT = "forward", "input", "weight"
Step = tuple[str, int, int]
"""What to do, in which of a rank's two stages, and with which microbatch."""


def dual_pipe_v(rank: int, num_ranks: int, num_microbatches: int) -> list[Step]:
    """Return what a rank does, in its order.

    Args:
        rank: Position in the pipeline.
        num_ranks: Ranks of the pipeline.
        num_microbatches: Parts of the batch, at least twice as many as ranks.
    """
    order, before, here = _Order(), num_ranks - rank - 1, rank + 1
    for _ in range(2 * before):
        order.forward(0)
    for _ in range(here):
        order.forward(0)
        order.forward(1)
    for _ in range(before):
        order.backward(1)
        order.forward(1)
    for _ in range(num_microbatches - 2 * num_ranks + here):
        order.backward(1)
        order.forward(0)
        order.backward(0)
        order.forward(1)
    for _ in range(before):
        order.backward(1)
        order.backward(0)
        order.forward(1)
    half = here // 2
    for index in range(here):
        order.backward(1, waits=index >= half + here % 2)
        order.backward(0, waits=index >= half)
    for _ in range(before):
        order.weight()
        order.backward(0, waits=True)
    while order.waiting:
        order.weight()
    return order.steps


class _Order:
    """The steps of one rank, whose microbatches come one after the other in each stage."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.waiting: deque[Step] = deque()
        self._numbers: Counter[tuple[str, int]] = Counter()

    def forward(self, chunk: int) -> None:
        self.steps.append((FORWARD, chunk, self._next(FORWARD, chunk)))

    def backward(self, chunk: int, *, waits: bool = False) -> None:
        """Compute gradients of inputs; those of weights at once, or later."""
        number = self._next(INPUT, chunk)
        self.steps.append((INPUT, chunk, number))
        (self.waiting if waits else self.steps).append((WEIGHT, chunk, number))

    def weight(self) -> None:
        """Compute the gradients of weights that have waited longest, if any."""
        if self.waiting:
            self.steps.append(self.waiting.popleft())

    def _next(self, work: str, chunk: int) -> int:
        self._numbers[work, chunk] += 1
        return self._numbers[work, chunk] - 1
