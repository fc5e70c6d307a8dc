"""Backward passes whose gradients add up before a step: what need not be sent in each of them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from booster_zero.engine.optimizer import ZeroOptimizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.optim import Optimizer


@contextlib.contextmanager
def keeping_gradients(optimizer: Optimizer | None) -> Iterator[None]:
    """Keep whole gradients here, inside, until the first backward after the body, or `ZeroOptimizer.settle`.

    Args:
        optimizer: The boosted optimizer; nothing changes where it is another.

    Collective: none; no backward inside is.
    """
    if not isinstance(optimizer, ZeroOptimizer):
        yield
        return
    reducer = optimizer.reducer
    before, reducer.is_paused = reducer.is_paused, True
    try:
        yield
    finally:
        reducer.is_paused = before


@contextlib.contextmanager
def keeping_shards(optimizer: Optimizer | None) -> Iterator[None]:
    """Reduce gradients into shards, inside, which are averaged over replicas by the first backward after the body.

    Args:
        optimizer: The boosted optimizer; nothing changes where it is another.

    Collective: none; each backward inside is, in the shard group.
    """
    if not isinstance(optimizer, ZeroOptimizer):
        yield
        return
    underway = optimizer.reducer.underway
    before, underway.averages = underway.averages, False
    try:
        yield
    finally:
        underway.averages = before
