"""Clipping reports NaN on every rank, whichever holds the gradient that is not finite."""

import math

import torch
import torch.distributed as dist
from matrix import matrix
from torch import nn

from booster_core import Booster
from booster_hybrid import HybridParallelPlugin
from booster_testing import run_on_ranks


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


@matrix(["zero"], plugin=["fsdp", "zero", "gemini", "hybrid"])
def test_clipping_reports_nan_on_every_rank(plugin):
    for norms in run_on_ranks(clipped_with_nan, 2, plugin):
        assert all(map(math.isnan, norms))
