"""Values that bypass the layers are sent along to the stages that need them, or refused where they can't be."""

from __future__ import annotations

import pytest
import torch
from cases import Case, Setting, assert_equals_one_process
from model_zoo import get_model
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_hybrid.policy.base import ShardingPolicy
from booster_testing import expect_on_ranks, run_on_ranks


class Skipping(nn.Module):
    """Uses on its last layers what was there before the first, and a state from between layers and its output."""

    def __init__(self):
        super().__init__()
        self.entry = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.middle = nn.Linear(4, 4)
        self.offset = nn.Parameter(torch.linspace(0.0, 1.0, 4))
        self.exit = nn.Linear(4, 4)

    def forward(self, x):
        first = self.entry(x)
        state = first
        for index, layer in enumerate(self.layers):
            state = torch.tanh(layer(state)) + self.offset
            if index == 1:
                between = self.middle(state)
        return {"out": self.exit(state + first), "between": between}


def loss_of(outputs, _):
    return outputs["out"].square().mean() + outputs["between"].mean()


def rows(number, replica):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(1 + 10 * number + replica))


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        pytest.param(2, {"pp_size": 2}, marks=pytest.mark.slow),
        pytest.param(2, {"pp_size": 2, "num_layers_per_stage": (1, 3)}, marks=pytest.mark.slow),
        (2, {"pp_size": 2, "pp_style": "zbv"}),
        pytest.param(4, {"pp_size": 4}, marks=pytest.mark.slow),
        pytest.param(4, {"pp_size": 2, "pp_style": "interleaved", "zero_stage": 2}, marks=pytest.mark.slow),
    ],
    ids=["pp2", "uneven", "zbv", "pp4", "interleaved"],
)
def test_values_that_bypass_layers_are_sent(num_ranks, options):
    example = {"custom_policy": ShardingPolicy(layers=("layers",)), "example_batch": rows(0, 0)[:2]}
    setting = Setting(HybridParallelPlugin, {**options, **example}, num_ranks)
    assert_equals_one_process(Case(build=Skipping, batch=rows, loss=loss_of, steps=2, outputs=True), setting)


def hidden_states(name, options):
    zoo = get_model(name)
    model = zoo.seeded()
    model.config.output_hidden_states = True
    batch = zoo.share(0, 0, 4)
    with torch.no_grad():
        expected = model(**batch).hidden_states
    booster = Booster("cpu", plugin=HybridParallelPlugin(**options, example_batch=zoo.share(0, 0, 2)))
    model, *_ = booster.boost(model)
    result = booster.execute_pipeline(iter([batch]), model, zoo.loss, return_outputs=True)
    if result["outputs"] is not None:
        assert len(result["outputs"].hidden_states) == len(expected)
        for ours, theirs in zip(result["outputs"].hidden_states, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["transformers/llama", pytest.param("transformers/gpt2_lm", marks=pytest.mark.slow)])
def test_hidden_states_of_all_layers_are_returned(name):
    run_on_ranks(hidden_states, 2, name, {"pp_size": 2})


class Stashing(nn.Module):
    """A layer that leaves a part of the loss in itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.linear(x)
        self.penalty = hidden.square().mean()
        return torch.tanh(hidden)


class Collecting(nn.Module):
    """Reads what its layers have left in themselves."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Stashing() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.mean() + sum(layer.penalty for layer in self.layers)}


def boost_collecting():
    policy = ShardingPolicy(layers=("layers",))
    plugin = HybridParallelPlugin(pp_size=2, custom_policy=policy, example_batch=torch.ones(2, 4))
    Booster("cpu", plugin=plugin).boost(Collecting())


def test_a_loss_on_internals_of_earlier_layers_is_refused():
    message = r"before its layer 'layers\.2': output \['loss'\] needs values of what layer 'layers\.0' writes"
    expect_on_ranks(ConfigError, message, boost_collecting, 2)
