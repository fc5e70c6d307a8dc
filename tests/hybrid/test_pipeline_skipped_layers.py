"""Layers that a forward skips: refused at a cut."""

from functools import partial

import pytest
import torch
from cases import Case, assert_equals_one_process, noise, train_boosted
from hybrid_runs import stages
from torch import nn

from booster_core.errors import ConfigError
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


def skip(skipped, _step, model, _optimizer):
    model.skipped = skipped


def skip_on_rank_1(skipped, *given):
    if torch.distributed.get_rank() == 1:
        skip(skipped, *given)


class Choosing(Skipping):
    """Calls its last layer only where it is told to, which the dry run does not see."""

    def __init__(self):
        super().__init__()
        self.skipped = (5,)


def case_of(skipped, build=Skipping, how=skip, steps=2):
    """Return a training that skips layers which the dry run at `boost` has called."""
    return Case(build=build, batch=noise(4, 4), before_step=partial(how, skipped), steps=steps)


@pytest.mark.parametrize(
    ("skipped", "options"),
    [((1, 4), {}), ((0, 1, 4), {"pp_style": "zbv", "num_layers_per_stage": (2, 1, 2, 1)})],
    ids=["1f1b", "zbv"],
)
def test_layers_inside_of_a_stage_may_be_skipped(skipped, options):
    assert_equals_one_process(case_of(skipped), stages(torch.ones(2, 4), **options))


AT_RANDOM = partial(Skipping, partial(torch.rand, []))


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        (case_of((3,)), {}, r"Stage 0 .* ended without a call of layer 'layers\.3', with which stage 1 begins"),
        pytest.param(
            case_of((5,)),
            {"pp_style": "zbv", "num_layers_per_stage": (2, 1, 2, 1)},
            r"Stage 2 .* of layer 'layers\.5'",
            marks=pytest.mark.slow,
        ),
        (
            case_of((3,), how=skip_on_rank_1),
            {},
            r"Stage 1 .* without a call of layer 'layers\.3', with which it begins",
        ),
        (case_of((), Choosing), {}, r"layer 'layers\.5', which the dry run at `boost` did not"),
        (
            case_of((), AT_RANDOM, steps=20),
            {},
            r"Stage 0 .* without a call of layer 'layers\.3', .* \(set `layerdrop` to 0\)",
        ),
    ],
    ids=["boundary", "zbv", "received", "not called before", "at random"],
)
def test_a_skipped_layer_at_a_cut_is_named_on_every_rank(case, options, message):
    expect_on_ranks(ConfigError, message, train_boosted, 2, case, stages(torch.ones(2, 4), **options))
