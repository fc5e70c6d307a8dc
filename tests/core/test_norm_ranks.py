"""Norms over ranks are the same on every rank, whichever holds what is not finite."""

import math

import pytest
import torch
import torch.distributed as dist

from booster_core.gradients.norm import global_norm
from booster_testing import run_on_ranks


def norms_with(bad_value, norm_type):
    """Return the norm over the ranks, with a value in a gradient of each of them in turn, and of none."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = [torch.tensor([1.0, bad_value if rank == bad else 2.0 + rank]) for bad in range(size + 1)]
    return [float(global_norm([gradient], norm_type, groups=[dist.group.WORLD])) for gradient in own]


@pytest.mark.parametrize("norm_type", [math.inf, 2.0, 1.0])
def test_the_norm_is_nan_on_every_rank_where_a_gradient_of_any_rank_is(norm_type):
    for norms in run_on_ranks(norms_with, 3, math.nan, norm_type):
        assert all(map(math.isnan, norms[:3]))
        assert norms[3] == pytest.approx({math.inf: 4.0, 2.0: 32**0.5, 1.0: 12.0}[norm_type])


def test_the_largest_magnitude_may_be_infinite():
    for norms in run_on_ranks(norms_with, 3, -math.inf, math.inf):
        assert norms == [math.inf, math.inf, math.inf, 4.0]
