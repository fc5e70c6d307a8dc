"""What can't be had is told on every rank, with the values that were asked for and those that would do."""

import pytest
import torch
from residual_stack import SPLIT, Layer, Stack
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_testing import expect_on_ranks, run_on_ranks

RING = {"sp_size": 2, "sequence_parallelism_mode": "ring_attn"}


def boost(options, model):
    booster = Booster("cpu", plugin=HybridParallelPlugin(**options))
    return booster, *booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))[:2]


def boost_custom(options):
    boost(options, Stack())


def test_a_model_class_without_policy_is_told_how_to_write_one():
    message = (
        r"There is no sharding policy for Stack. Pass `custom_policy=ShardingPolicy\(rules=\(ModuleRule\(.*"
        r"'layers\.\*\.up', 'layers\.\*\.down'.*hook `sharding_policy`; docs/sharding-policies.md has a whole example"
    )
    expect_on_ranks(ConfigError, message, boost_custom, 2, {"tp_size": 2})


@pytest.mark.parametrize("options", [{"pp_size": 2}, RING], ids=["pp", "sp"])
def test_layers_are_found_with_an_example_only(options):
    message = r"the layers of Stack needs an example of what its forward takes. Pass the data loader to `boost`, or .*"
    expect_on_ranks(ConfigError, message, boost_custom, 2, options)


class Told(Layer):
    """A layer that needs more than hidden states."""

    def forward(self, x, scale):
        return super().forward(x * scale["all"])


class Telling(Stack):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Told() for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, {"all": torch.tensor(2.0)})
        return x


def boost_unseen(options):
    booster, *_ = boost({"tp_size": 2, "custom_policy": SPLIT, **options}, Telling())
    return booster.plugin.describe()["unchecked_layers"]


def test_what_no_batch_shows_raises_unless_it_is_allowed_or_an_example_is_given():
    message = r"could not be checked whether 'layers\.0' of Telling .*\(1 more.*no batch showed.*unchecked='allow'`"
    expect_on_ranks(ConfigError, message, boost_unseen, 2, {})
    for unchecked in run_on_ranks(boost_unseen, 2, {"unchecked": "allow"}):
        assert list(unchecked) == ["layers.0", "layers.1"]
    assert run_on_ranks(boost_unseen, 2, {"example_batch": torch.zeros(2, 3, 8)}) == [{}, {}]
