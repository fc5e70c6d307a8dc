"""Norms over ranks are the same on every rank, whichever holds what is not finite."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from booster_core import Booster
from booster_core.gradients.norm import global_norm
from booster_hybrid import HybridParallelPlugin
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


class Net(nn.Module):
    """Several layers, so that a rank holds the gradients of a part of them under strategies that shard."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))

    def forward(self, x):
        return self.layers(x)


def clipped_with_nan(plugin):
    """Return the norm that clipping reports where one element of one layer's gradient is NaN."""
    torch.manual_seed(0)
    net = Net()
    booster = Booster(plugin=HybridParallelPlugin(zero_stage=1) if plugin == "hybrid" else plugin)
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    places = {}
    for layer in range(4):
        booster.backward((model(torch.full((2, 6), dist.get_rank() + 1.0)) * 1e-3).square().sum(), optimizer)
        held = [gradient for part in optimizer.gradients_in_parts() for gradient in part]
        if dist.get_rank() == 0:
            held[layer % len(held)].view(-1)[0] = math.nan
        places[layer] = float(optimizer.clip_grad_by_norm(1.0, norm_type=math.inf))
        optimizer.zero_grad()
    return list(places.values())


@pytest.mark.parametrize("plugin", ["fsdp", "zero", "gemini", "hybrid"])
def test_clipping_reports_nan_on_every_rank(plugin):
    for norms in run_on_ranks(clipped_with_nan, 2, plugin):
        assert all(map(math.isnan, norms))
