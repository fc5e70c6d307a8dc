"""Random numbers under a pipeline: layers drop by themselves in each microbatch; forwards draw alike on all stages."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hybrid_runs import boosted
from matrix import matrix
from ranked import on_ranks
from residual_stack import SPLIT, Layer, Stack
from torch import nn

from booster_testing import run_on_ranks

MICROBATCHES = 3
LAYERS = 8
WIDTH = 128


class Dropping(Layer):
    """Notes what it drops in each call."""

    def __init__(self, number, masks):
        super().__init__()
        self.number, self.masks, self.dropout = number, masks, nn.Dropout(0.5)

    def forward(self, x):
        kept = self.dropout(torch.ones(x.shape[0], WIDTH))
        self.masks.append((self.number, tuple(kept.flatten().tolist())))
        return super().forward(x) * kept.mean(-1, keepdim=True)


def masks_of(options):
    """Return the masks of two batches with the layers that used them, and what is drawn after."""
    masks: list = []
    torch.manual_seed(0)
    model = Stack()
    model.layers = nn.ModuleList(Dropping(number, masks) for number in range(LAYERS))
    batch = {"x": torch.ones(MICROBATCHES, 8)}
    options = {"num_microbatches": MICROBATCHES, "custom_policy": SPLIT, "example_batch": batch, **options}
    booster, model, optimizer = boosted(model, pp_size=2, **options)
    masks.clear()
    torch.manual_seed(1)  # alike on all ranks
    for _ in range(2):
        booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.square().mean(), optimizer)
        optimizer.zero_grad()
    return masks, float(torch.rand(()))


@matrix(["zbv"], style=["1f1b", "interleaved", "zbv"])
def test_dropout_differs_between_layers_and_microbatches(style):
    """What is drawn between batches is alike on all ranks."""
    of_ranks = run_on_ranks(masks_of, 2, {"pp_style": style})
    masks = [mask for found, _ in of_ranks for _, mask in found]
    assert len(masks) == len(set(masks)) == 2 * LAYERS * MICROBATCHES
    assert len({after for _, after in of_ranks}) == 1


def test_dropout_matches_on_tensor_parallel_ranks():
    of_ranks = run_on_ranks(masks_of, 4, {"tp_size": 2})
    masks = [found for found, _ in of_ranks]
    assert masks[0] == masks[1]
    assert masks[2] == masks[3]
    assert not {mask for _, mask in masks[0]} & {mask for _, mask in masks[2]}


@pytest.mark.parametrize("style", ["1f1b", pytest.param("interleaved", marks=pytest.mark.slow), "zbv"])
@on_ranks(2)
def test_noise_before_layers_is_that_after_them(style):
    """Outputs are zero, in training and evaluation."""

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

    example = {"x": torch.randn(2, 8)}
    booster, model, optimizer = boosted(
        Diffusion(), pp_size=2, pp_style=style, num_microbatches=4, example_batch=example
    )
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(dist.get_rank())
    np.random.seed(dist.get_rank())  # noqa: NPY002 - the generator that models use
    random.seed(dist.get_rank())
    before = random.getstate()
    for trained in (optimizer, None, optimizer):
        loss = booster.execute_pipeline(iter([{"x": x}]), model, lambda out, _: out.square().mean(), trained)["loss"]
        assert (loss is not None) == booster.plugin.stage_manager.is_last_stage()
        assert loss is None or float(loss) == pytest.approx(0.0, abs=1e-10)
    assert random.getstate() == before
