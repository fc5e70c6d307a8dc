"""`split_gather` refuses layers whose unsplit parts look at several positions of a sequence."""

from functools import partial
from unittest import mock

import pytest
import torch
from cases import Case, Setting, assert_equals_one_process, noise, train_boosted
from hybrid_runs import SPLIT_GATHER
from ranked import on_ranks, raises_on_ranks
from torch import nn
from torch.nn import functional

from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin, ModuleRule, ShardingPolicy, Style
from booster_hybrid.probe.probe import CheckedPolicy
from booster_testing import expect_on_ranks, run_on_ranks

WIDTH = 8


class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        return self.down(functional.gelu(self.up(x)))


class Layer(nn.Module):
    """A split feed-forward block and a part that treats each position separately."""

    def __init__(self, block=Feed, part=None):
        super().__init__()
        self.mlp = block()
        self.part = nn.LayerNorm(WIDTH) if part is None else part

    def forward(self, x):
        return x + self.mlp(self.mixed(x))

    def mixed(self, x):
        return self.part(x)


class OwnAttention(Layer):
    """Attends in the layer's own forward."""

    def __init__(self):
        super().__init__(part=nn.Linear(WIDTH, WIDTH))

    def mixed(self, x):
        states = self.part(x)
        return functional.scaled_dot_product_attention(states, states, states)


class MixingBetween(Feed):
    """A block that mixes positions before and between its split layers."""

    def forward(self, x):
        hidden = functional.gelu(self.up(x - x.mean(1, keepdim=True)))
        return self.down(hidden + hidden.cumsum(1))


class MixingFeed(MixingBetween):
    """Multiplies by positions as well, of which a rank has only some."""

    def forward(self, x):
        return super().forward(x) * torch.arange(x.shape[1]).view(-1, 1)


class WritingFeed(Feed):
    """A block that writes to its input before its split layer reads it, as dropout in place does."""

    def forward(self, x):
        x *= 2.0
        return super().forward(x)


class Unsplit(nn.Module):
    """A layer of which nothing is split, with a part that treats each position separately."""

    def __init__(self):
        super().__init__()
        self.part = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + functional.gelu(self.part(x))


class UnsplitConvolution(Unsplit):
    def __init__(self):
        super().__init__()
        self.part = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x):
        return x + self.part(x.transpose(1, 2)).transpose(1, 2)


KINDS = {
    "Layer": Layer,
    "OwnAttention": OwnAttention,
    "OwnBlock": partial(Layer, MixingBetween),
    "BlockAround": partial(Layer, MixingFeed),
    "WritingBlock": partial(Layer, WritingFeed),
    "Unsplit": Unsplit,
    "UnsplitConvolution": UnsplitConvolution,
    "Dropping": partial(Layer, part=nn.Dropout(0.5)),
}


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList((kind(), Layer()))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x = x["hidden"] if isinstance(x, dict) else x
        return x


POLICY = ShardingPolicy(
    rules=(ModuleRule("layers.*.mlp.up", Style.COLUMN), ModuleRule("layers.*.mlp.down", Style.ROW)), layers=("layers",)
)


SETTING = Setting(HybridParallelPlugin, {**SPLIT_GATHER, "custom_policy": POLICY})


states = noise(2, 5, WIDTH)


def case_of(kind):
    no_effect = ("layers.0.part.bias",) if kind == "OwnBlock" else ()  # its block takes means over the sequence off
    return Case(build=partial(Model, KINDS[kind]), batch=states, steps=2, no_effect=no_effect)


@pytest.mark.parametrize("kind", ["OwnAttention", "BlockAround", "UnsplitConvolution"])
def test_layers_that_mix_positions_are_refused_at_boost(kind):
    expect_on_ranks(ConfigError, r"'split_gather'.*layer 'layers\.0'", train_boosted, 2, case_of(kind), SETTING)


@raises_on_ranks(ConfigError, "layer of class `InDict` returns a `dict`", 2)
def test_layers_that_return_containers_are_refused():
    """What a layer returns is looked at in each forward, also where the layer could not be checked."""

    class InDict(Layer):
        def forward(self, x):
            return {"hidden": super().forward(x)}

    with mock.patch("booster_hybrid.boosting.check_policy", return_value=CheckedPolicy({})):
        train_boosted(Case(build=partial(Model, InDict), batch=states, steps=2), SETTING)


@pytest.mark.parametrize("kind", ["Layer", "OwnBlock", "WritingBlock", "Unsplit"])
def test_layers_that_are_pointwise_outside_of_blocks_train_as_one_process(kind):
    assert_equals_one_process(case_of(kind), SETTING)


def test_dropout_is_pointwise():
    run_on_ranks(train_boosted, 2, case_of("Dropping"), SETTING)


@on_ranks(2)
def test_layers_that_no_batch_reaches_have_whole_sequences():
    class SeeingLayer(Unsplit):
        def forward(self, x, scale):
            return super().forward(x) + scale * x.cumsum(1)

    class Seeing(Model):
        """Also has layers for pictures, which its example has none of."""

        def __init__(self):
            super().__init__(Layer)
            self.pictures = nn.ModuleList(SeeingLayer() for _ in range(2))

        def forward(self, x, pictures=None):
            if pictures is not None:
                for layer in self.pictures:
                    pictures = layer(pictures, 0.5)
                x = torch.cat([x, pictures], 1)
            return super().forward(x)

    def with_pictures(number, replica):
        return states(number, replica), noise(2, 4, WIDTH)(number, replica)

    policy = ShardingPolicy(rules=POLICY.rules, layers=("layers", "pictures"))
    example = noise(2, 6, WIDTH)(0, 0)
    setting = Setting(HybridParallelPlugin, {**SPLIT_GATHER, "custom_policy": policy, "example_batch": example})
    assert_equals_one_process(Case(build=Seeing, batch=with_pictures, steps=2), setting)
