"""What a mean over labels is divided by: those of the call, or those of a batch of which the call sees a part.

Losses that are means leave out labels such as -100. The mean of the means of a batch's parts is another one than the
batch's where more labels count in one part than in another (huggingface/transformers#34191).
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    Counts = Callable[[Tensor, int, Tensor | None], Tensor]
    """Called with labels, the one that does not count and the classes' weights; returns what to divide a sum by."""

__all__ = ["are_parts_weighed", "count_labels", "counting", "labels_of_mean", "weighing_parts"]

_counts: ContextVar[Counts | None] = ContextVar("counts", default=None)
_are_weighed: ContextVar[bool] = ContextVar("are_weighed", default=False)


def count_labels(labels: Tensor, ignore_index: int = -100, weight: Tensor | None = None) -> Tensor:
    """Return how many labels count, or the sum of their classes' weights, without dimensions."""
    is_counted = labels != ignore_index
    return is_counted.sum() if weight is None else (weight[labels.masked_fill(~is_counted, 0)] * is_counted).sum()


def labels_of_mean(labels: Tensor, ignore_index: int = -100, weight: Tensor | None = None) -> Tensor:
    """Return what the sum of these labels' losses is divided by for a mean; see `counting`."""
    counts = _counts.get()
    return (counts or count_labels)(labels, ignore_index, weight)


@contextlib.contextmanager
def counting(counts: Counts | None) -> Iterator[None]:
    """Divide sums by what a function returns, inside; ``None`` leaves it at the labels of each call."""
    token = _counts.set(counts)
    try:
        yield
    finally:
        _counts.reset(token)


@contextlib.contextmanager
def weighing_parts() -> Iterator[None]:
    """Leave means those of parts, inside, as the caller multiplies each by the part's weight."""
    token = _are_weighed.set(True)
    try:
        yield
    finally:
        _are_weighed.reset(token)


def are_parts_weighed() -> bool:
    """Return whether this is inside of `weighing_parts`."""
    return _are_weighed.get()
