"""Norms over ranks are the same on every rank, whichever holds what is not finite."""

import math

import torch
import torch.distributed as dist

from booster_core.gradients.norm import global_norm
from booster_testing import run_on_ranks


def norms_with_nan():
    """Return the largest magnitude over the ranks, with NaN on each of them in turn, and on none."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = [torch.tensor([1.0, math.nan if rank == bad else 2.0 + rank]) for bad in range(size + 1)]
    return [float(global_norm([gradient], math.inf, groups=[dist.group.WORLD])) for gradient in own]


def test_the_largest_magnitude_is_not_finite_where_a_gradient_of_any_rank_is_nan():
    for norms in run_on_ranks(norms_with_nan, 3):
        assert norms == [math.inf, math.inf, math.inf, 4.0]
