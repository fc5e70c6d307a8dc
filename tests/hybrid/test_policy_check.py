"""A tensor parallel policy that would change what layers compute raises at `boost`, on every rank."""

from __future__ import annotations

import pytest
import torch
from cases import Case, Setting, assert_equals_one_process
from ranked import raises_on_ranks
from torch import nn
from torch.nn import functional

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin, ModuleRule, ShardingPolicy, Style
from booster_testing import expect_on_ranks, run_on_ranks

WIDTH, HEADS = 24, 4


class Block(nn.Module):
    def __init__(self, width=WIDTH, num_heads=HEADS):
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate_up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        split = [each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in (q, k, v)]
        attended = functional.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, num_layers=2, width=WIDTH, num_heads=HEADS):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def policy(gate_up=None):
    return ShardingPolicy(
        rules=(
            ModuleRule("blocks.*.qkv", Style.COLUMN, "num_heads", num_blocks=3, scaled=("num_heads",)),
            ModuleRule("blocks.*.out", Style.ROW, units="num_heads"),
            ModuleRule("blocks.*.gate_up", Style.COLUMN, **({"num_blocks": 2} if gate_up is None else gate_up)),
            ModuleRule("blocks.*.down", Style.ROW),
        ),
        layers=("blocks",),
    )


def boost(model, sharding, **options):
    booster = Booster("cpu", plugin=HybridParallelPlugin(**{"tp_size": 2, "custom_policy": sharding, **options}))
    return booster, *booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))[:2]


@raises_on_ranks(ConfigError, r"layer 'blocks\.0'.*by up to.*'blocks\.0\.gate_up'.*`num_blocks=2`", 2)
def test_zero_initialised_projections_do_not_hide_a_wrong_policy():
    """Which policies are wrong, and how that is found, is in `test_probe.py`."""
    model = Model()
    for block in model.blocks:
        nn.init.zeros_(block.out.weight)
        nn.init.zeros_(block.down.weight)
    boost(model, policy(gate_up={}))


def states(number, replica):
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(10 * number + replica))


def described(booster, _model, _optimizer):
    return booster.describe()


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [pytest.param(2, {}, marks=pytest.mark.slow), (3, {"tp_size": 3})],
    ids=["tp2", "uneven-heads"],
)
def test_a_right_policy_trains(num_ranks, options):
    setting = Setting(HybridParallelPlugin, {"tp_size": 2, "custom_policy": policy(), **options}, num_ranks)
    found = assert_equals_one_process(Case(build=Model, batch=states), setting, tell=described)
    assert all("unchecked_layers={}" in each for each in found)


class Told(Block):
    """Needs more than hidden states."""

    def forward(self, x, scale):
        return super().forward(x * scale["all"])


class TellingModel(Model):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Told() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x, {"all": torch.tensor(2.0)})
        return self.head(x)


def boost_unseen(options):
    booster, *_ = boost(TellingModel(), policy(), **options)
    return booster.plugin.describe()["unchecked_layers"]


def test_what_no_batch_shows_raises_unless_it_is_allowed_or_an_example_is_given():
    message = (
        r"could not be checked whether 'blocks\.0' of TellingModel .*\(1 more.*no batch showed.*`unchecked='allow'`"
    )
    expect_on_ranks(ConfigError, message.replace("`unchecked", "unchecked"), boost_unseen, 2, {})
    for unchecked in run_on_ranks(boost_unseen, 2, {"unchecked": "allow"}):
        assert list(unchecked) == ["blocks.0", "blocks.1"]
    assert run_on_ranks(boost_unseen, 2, {"example_batch": torch.zeros(2, 3, WIDTH)}) == [{}, {}]
