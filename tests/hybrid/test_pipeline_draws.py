"""Random values of a model's own forward, and outputs that the example did not ask for: right, or raised everywhere."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from booster_core import Booster
from booster_hybrid import HybridParallelPlugin
from booster_testing import run_on_ranks


class Diffusion(nn.Module):
    """Adds noise before its layers, which return what they get, and takes it away after them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
        for layer in self.layers:
            nn.init.eye_(layer.weight)

    def forward(self, x):
        noise = torch.randn_like(x) + np.random.rand() + random.random()  # noqa: NPY002 - what models do
        found = x + noise
        for layer in self.layers:
            found = layer(found)
        return found - x - noise


def losses_of(style, is_seeded_by_rank):
    """Return the losses of models that return zero, in training and evaluation."""
    plugin = HybridParallelPlugin(pp_size=2, pp_style=style, num_microbatches=4, example_batch={"x": torch.randn(2, 8)})
    booster = Booster("cpu", plugin=plugin)
    model = Diffusion()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.0))
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    seed = dist.get_rank() if is_seeded_by_rank else 0
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the generator that models use
    random.seed(seed)
    before = random.getstate()
    found = []
    for trained in (optimizer, None, optimizer):
        result = booster.execute_pipeline(iter([{"x": x}]), model, lambda out, _: out.square().mean(), trained)
        found.append(result["loss"])
    assert random.getstate() == before
    return [float(each) for each in found if each is not None]


@pytest.mark.parametrize(
    ("style", "is_seeded_by_rank"),
    [("1f1b", True), pytest.param("interleaved", False, marks=pytest.mark.slow), ("zbv", True)],
)
def test_noise_before_layers_is_that_after_them(style, is_seeded_by_rank):
    found = [loss for losses in run_on_ranks(losses_of, 2, style, is_seeded_by_rank) for loss in losses]
    assert found == pytest.approx([0.0] * 3, abs=1e-10)
