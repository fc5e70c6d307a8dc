"""What can't be had is told on every rank, with the values that were asked for and those that would do."""

import pytest
import torch
from model_zoo import get_model
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin, ModuleRule, ShardingPolicy, Style
from booster_testing import expect_on_ranks, run_on_ranks

NAME = "transformers/llama"
RING = {"sp_size": 2, "sequence_parallelism_mode": "ring_attn"}


def boost(options, model=None):
    model = get_model(NAME).seeded() if model is None else model
    booster = Booster("cpu", plugin=HybridParallelPlugin(**options))
    return booster, *booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))[:2]


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def boost_custom(options):
    boost(options, Custom())


def test_a_model_class_without_policy_is_told_how_to_write_one():
    message = (
        r"There is no sharding policy for Custom. Pass `custom_policy=ShardingPolicy\(rules=\(ModuleRule\(.*"
        r"'blocks\.\*'.*hook `sharding_policy`; docs/sharding-policies.md has a whole example"
    )
    expect_on_ranks(ConfigError, message, boost_custom, 2, {"tp_size": 2})


@pytest.mark.parametrize("options", [{"pp_size": 2}, RING], ids=["pp", "sp"])
def test_layers_are_found_with_an_example_only(options):
    message = r"the layers of Custom needs an example of what its forward takes. Pass the data loader to `boost`, or .*"
    expect_on_ranks(ConfigError, message, boost_custom, 2, options)


class Told(nn.Module):
    """A layer that needs more than hidden states."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x, scale):
        return x + self.down(self.up(x * scale["all"]))


class Telling(Custom):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Told() for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x, {"all": torch.tensor(2.0)})
        return x


def boost_unseen(options):
    rules = (ModuleRule("blocks.*.up", Style.COLUMN), ModuleRule("blocks.*.down", Style.ROW))
    policy = ShardingPolicy(rules, layers=("blocks",))
    booster, *_ = boost({"tp_size": 2, "custom_policy": policy, **options}, Telling())
    return booster.plugin.describe()["unchecked_layers"]


def test_what_no_batch_shows_raises_unless_it_is_allowed_or_an_example_is_given():
    message = r"could not be checked whether 'blocks\.0' of Telling .*\(1 more.*no batch showed.*unchecked='allow'`"
    expect_on_ranks(ConfigError, message, boost_unseen, 2, {})
    for unchecked in run_on_ranks(boost_unseen, 2, {"unchecked": "allow"}):
        assert list(unchecked) == ["blocks.0", "blocks.1"]
    assert run_on_ranks(boost_unseen, 2, {"example_batch": torch.zeros(2, 3, 4)}) == [{}, {}]
