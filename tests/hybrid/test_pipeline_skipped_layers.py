"""Layers that a forward skips: refused at a cut."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from cases import Case, Setting, assert_equals_one_process, own_loss, train_boosted
from ranked import raises_on_ranks
from torch import nn

from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_hybrid.policy.base import ShardingPolicy
from booster_testing import expect_on_ranks


class Skipping(nn.Module):
    """Six layers, of which those in ``skipped`` are not called; ``draw`` tells for each whether it is, too."""

    def __init__(self, draw=None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.skipped = ()
        self.draw = draw

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            drops = self.training and self.draw is not None and self.draw() < 0.3
            if index not in self.skipped and not drops:
                x = torch.tanh(layer(x))
        return x


def setting_of(options):
    example = {"custom_policy": ShardingPolicy(layers=("layers",)), "example_batch": torch.ones(2, 4)}
    return Setting(HybridParallelPlugin, {"pp_size": 2, **example, **options})


def boosted(model):
    booster = setting_of({}).make_booster()
    return booster, *booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))[:2]


def rows(number, replica):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(2 + 10 * number + replica))


def skip(skipped, _step, model, _optimizer):
    model.skipped = skipped


def case_of(skipped):
    """Return a training that skips layers which the dry run at `boost` has called."""
    return Case(build=Skipping, batch=rows, before_step=partial(skip, skipped), steps=2)


@pytest.mark.parametrize(
    ("skipped", "options"),
    [((1, 4), {}), ((0, 1, 4), {"pp_style": "zbv", "num_layers_per_stage": (2, 1, 2, 1)})],
    ids=["1f1b", "zbv"],
)
def test_layers_inside_of_a_stage_may_be_skipped(skipped, options):
    assert_equals_one_process(case_of(skipped), setting_of(options))


@pytest.mark.parametrize(
    ("skipped", "options", "message"),
    [
        ((3,), {}, r"Stage 0 .* ended without a call of layer 'layers\.3', with which stage 1 begins"),
        pytest.param(
            (5,),
            {"pp_style": "zbv", "num_layers_per_stage": (2, 1, 2, 1)},
            r"Stage 2 .* of layer 'layers\.5'",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["boundary", "zbv"],
)
def test_a_skipped_layer_at_a_cut_is_named_on_every_rank(skipped, options, message):
    expect_on_ranks(ConfigError, message, train_boosted, 2, case_of(skipped), setting_of(options))


@raises_on_ranks(ConfigError, r"Stage 1 .* without a call of layer 'layers\.3', with which it begins", 2)
def test_received_activations_that_are_not_used_are_named_on_every_rank():
    skipped = (3,)
    booster, model, optimizer = boosted(Skipping())
    if torch.distributed.get_rank() == 1:
        model.unwrap().skipped = skipped
    booster.execute_pipeline(iter([torch.ones(4, 4)]), model, own_loss, optimizer)


class Choosing(Skipping):
    """Calls its last layer only where it is told to, which the dry run does not see."""

    def __init__(self):
        super().__init__()
        self.skipped = (5,)


@raises_on_ranks(ConfigError, r"layer 'layers\.5', which the dry run at `boost` did not", 2)
def test_a_layer_that_the_dry_run_did_not_call_is_named_on_every_rank():
    booster, model, optimizer = boosted(Choosing())
    model.unwrap().skipped = ()
    booster.execute_pipeline(iter([torch.ones(4, 4)]), model, own_loss, optimizer)


@raises_on_ranks(ConfigError, r"Stage 0 .* without a call of layer 'layers\.3', .* \(set `layerdrop` to 0\)", 2)
def test_a_layer_at_a_cut_that_training_skips_at_random_is_named_on_every_rank():
    torch.manual_seed(0)
    booster, model, optimizer = boosted(Skipping(partial(torch.rand, [])))
    for _ in range(20):
        booster.execute_pipeline(iter([torch.ones(4, 4)]), model, own_loss, optimizer)
