"""Replacing the gradient of one parameter in the shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_core.plugin import write_gradient
from booster_runtime.sharding import not_optimized
from booster_zero.engine.home import Role
from booster_zero.engine.optimizer import ZeroOptimizer

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


def set_gradient(optimizer: Optimizer | None, parameter: nn.Parameter, values: Tensor, name: str) -> None:
    """Replace this rank's part of a gradient that has been reduced.

    Args:
        optimizer: The boosted optimizer.
        parameter: The parameter; some rank has used it.
        values: In the parameter's shape, without loss scale.
        name: The parameter's name, for errors.

    Raises:
        ConfigError: If the optimizer does not hold the parameter.
    """
    if not isinstance(optimizer, ZeroOptimizer) or not optimizer.holds(parameter):
        raise not_optimized(name)
    layout = optimizer.layout
    index = next(index for index, each in layout.parameters.items() if each is parameter)
    bucket = layout.bucket_of(index)
    piece = bucket.piece_of.get(index)
    if piece is not None:
        with bucket.in_use(Role.GRAD, changes=True):
            part = values.reshape(-1)[piece.start : piece.stop].view(piece.values.shape)
            write_gradient(bucket.slice_of(bucket.make_gradient(), piece), part, optimizer)
