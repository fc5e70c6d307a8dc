"""What a plugin does with gradients: keep them until a later backward, or replace one in the shards."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from booster_core.plugin import write_gradient
from booster_runtime.sharding import not_optimized
from booster_zero.engine.memory import Role
from booster_zero.engine.optimizer import ShardedOptimizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer


@contextlib.contextmanager
def keeping_gradients(optimizer: Optimizer | None) -> Iterator[None]:
    """Keep whole gradients here, inside, until the first backward after the body, or `ShardedOptimizer.settle`.

    Args:
        optimizer: The boosted optimizer; nothing changes where it is another.

    Collective: none; no backward inside is.
    """
    if not isinstance(optimizer, ShardedOptimizer):
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
    if not isinstance(optimizer, ShardedOptimizer):
        yield
        return
    underway = optimizer.reducer.underway
    before, underway.averages = underway.averages, False
    try:
        yield
    finally:
        underway.averages = before


def set_gradient(optimizers: Sequence[Optimizer], parameter: nn.Parameter, values: Tensor, name: str) -> None:
    """Replace this rank's part of a gradient that has been reduced.

    Args:
        optimizers: The boosted optimizers of the model.
        parameter: The parameter; some rank has used it.
        values: In the parameter's shape, without loss scale.
        name: The parameter's name, for errors.

    Raises:
        ConfigError: If none of the optimizers holds the parameter.
    """
    optimizer = holder_of(optimizers, parameter)
    if optimizer is None:
        raise not_optimized(name)
    layout = optimizer.layout
    index = next(index for index, each in layout.parameters.items() if each is parameter)
    bucket = layout.bucket_of(index)
    piece = bucket.piece_of.get(index)
    if piece is not None:
        with bucket.in_use(Role.GRAD, changes=True):
            part = values.reshape(-1)[piece.start : piece.stop].view(piece.values.shape)
            write_gradient(bucket.slice_of(bucket.make_gradient(), piece), part, optimizer)


def holder_of(optimizers: Sequence[Optimizer], parameter: nn.Parameter) -> ShardedOptimizer | None:
    """Return which of a model's boosted optimizers holds a parameter; ``None`` if none does."""
    return next((each for each in optimizers if isinstance(each, ShardedOptimizer) and each.holds(parameter)), None)
