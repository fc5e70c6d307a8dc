"""Cutting a model into stages: how layers are shared out, and the dry run, which needs no values and leaves none."""

from __future__ import annotations

import cProfile

import pytest
import torch
from torch import nn

from booster_core.errors import ConfigError
from booster_hybrid.config import PipelineConfig
from booster_hybrid.pipeline.cut import share_layers
from booster_hybrid.pipeline.stages import StagePlan, find_cuts
from booster_runtime import LazyInitContext
from booster_runtime.lazy import take_recording


def test_layers_are_shared_out_and_the_ends_have_no_more_than_the_middle():
    counts = [stage.last - stage.first for stage in share_layers(10, 4)]
    assert sum(counts) == 10
    assert counts[0] <= min(counts[1:3])
    assert [stage.last - stage.first for stage in share_layers(5, 2, [2, 3])] == [2, 3]


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "asked", "message"),
    [
        (2, 3, None, "2 layers can't fill 3 stages"),
        (6, 2, [3, 4], r"num_layers_per_stage=\[3, 4\]` must list 2 positive numbers that add up to the model's 6"),
        (6, 2, [6, 0], "positive numbers"),
    ],
)
def test_layers_that_do_not_divide_are_refused(num_layers, num_stages, asked, message):
    with pytest.raises(ConfigError, match=message):
        share_layers(num_layers, num_stages, asked)


def test_a_layer_that_is_called_twice_cannot_be_cut():
    class Repeated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2)])

        def forward(self, x):
            return self.layers[0](self.layers[0](x))

    with pytest.raises(ConfigError, match=r"Layer 'layers\.0' is called 2 times"):
        find_cuts(Repeated(), ["layers"], {"x": torch.ones(1, 2)}, PipelineConfig(size=2), trains=True)


def test_a_model_without_the_lists_of_its_policy_is_refused():
    with pytest.raises(ConfigError, match="'blocks', of which the model has none"):
        find_cuts(torch.nn.Linear(2, 2), ["blocks"], {"input": torch.ones(1, 2)}, PipelineConfig(size=2), trains=True)


@pytest.mark.parametrize("looks", [False, True], ids=["fake", "real"])
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_layers_are_found_and_buffers_stay(lazy: bool, looks: bool) -> None:
    class Normed(nn.Module):
        """Writes to buffers, and looks at values on its way where it is told to."""

        def __init__(self, *, looks: bool = False) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.looks = looks

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(x)
            for block in self.blocks:
                x = block(x)
            return x.relu() if self.looks and bool((x > 0).all()) else x

    if lazy:
        with LazyInitContext():
            model = Normed(looks=looks)
        take_recording(model, "cpu")
    else:
        model = Normed(looks=looks)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    trace = find_cuts(model, ["blocks"], {"x": torch.ones(2, 4)}, PipelineConfig(size=2), trains=True).trace
    assert [layer.name for layer in trace.layers] == ["blocks.0", "blocks.1", "blocks.2"]
    assert trace.uses["norm"] == (0,)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), state)
    elements = sum(parameter.untyped_storage().nbytes() // 4 for parameter in model.parameters())
    assert elements == (8 if lazy else sum(parameter.numel() for parameter in model.parameters()))


def test_a_layer_of_another_stage_costs_six_calls():
    def calls_of_last_stage(num_layers):
        """Return how many functions the last of two stages calls in a forward, which has two of the layers."""
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))
        batch = torch.ones(2, 4)
        config = PipelineConfig(size=2, num_layers_per_stage=(num_layers - 2, 2))
        plan = StagePlan.of(model, find_cuts(model, [""], batch, config, trains=False), config)
        staged, profile = plan.cut(model, 1, lambda each: each.dtype), cProfile.Profile()
        for _ in range(2):  # the first one finds out what functions return
            received = {"input": torch.ones(2, 4)}
            with staged.activated(1, received), profile:
                staged.run(batch)
            number, _ = sum(each.callcount for each in profile.getstats()), profile.clear()
        return number

    few, many = map(calls_of_last_stage, (12, 32))
    assert many - few <= 6 * 20
