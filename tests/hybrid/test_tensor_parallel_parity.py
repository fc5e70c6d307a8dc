"""Layers split over ranks give the gradients of the whole model, in fp64, where nothing hides behind rounding."""

from __future__ import annotations

import copy

import torch
from matrix import matrix
from model_parity import assert_parts_of_gradients
from model_zoo import get_model
from model_zoo.registry import in_double

from booster_hybrid.mesh import RankGroup
from booster_hybrid.policy.base import ModuleRule, ShardingPolicy, Style
from booster_hybrid.policy.find import policy_for
from booster_hybrid.tensor_parallel.plan import parallelize
from booster_testing import run_on_ranks


def compare(names):
    for name in names:
        zoo = get_model(name)
        whole = zoo.seeded().double()
        with torch.no_grad():
            for parameter in whole.parameters():
                if parameter.dim() == 1:  # biases begin with zeros, which don't show how often they are added
                    parameter.add_(torch.randn_like(parameter), alpha=0.05)
        if hasattr(whole.config, "_experts_implementation"):
            whole.config._experts_implementation = "eager"  # the grouped kernel has no fp64
        model = copy.deepcopy(whole)
        split = parallelize(model, policy_for(whole), RankGroup.of(None), parallel_output=False)
        assert split.splits, name
        batch = in_double(zoo.whole(0, 1, 4))
        expected, found = zoo.loss_of(whole, batch), zoo.loss_of(model, batch)
        expected.backward()
        found.backward()
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0, msg=name)  # some losses are taken in fp32
        assert_parts_of_gradients(model, split.splits, whole, name)


@matrix(["llama-3"], name=["llama", "qwen2", "glm", "falcon", "falcon_alibi"], num_ranks=[3, 4])
def test_ranks_may_share_key_and_value_heads(name, num_ranks):
    """Two key/value heads, or one, serve four queries: with sizes that do not divide either."""
    run_on_ranks(compare, num_ranks, [f"transformers/{name}"])


class Tiny(torch.nn.Module):
    """A custom model: fused q/k/v, no configuration."""

    def __init__(self, heads=6, width=24):
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:-1], 3, self.heads, self.size).movedim(-3, 0).transpose(-2, -3).unbind(0)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(-2, -3).flatten(-2))


class Custom(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Tiny() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


POLICY = ShardingPolicy(
    rules=(
        ModuleRule("blocks.*.qkv", Style.COLUMN, "heads", num_blocks=3, scaled=("heads",)),
        ModuleRule("blocks.*.out", Style.ROW, "heads"),
    ),
    layers=("blocks",),
)


def custom_model():
    torch.manual_seed(0)
    whole = Custom().double()
    model = copy.deepcopy(whole)
    split = parallelize(model, POLICY, RankGroup.of(None))
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    whole(x).square().sum().backward()
    model(x).square().sum().backward()
    assert_parts_of_gradients(model, split.splits, whole, relative=1e-12)
    return model.blocks[0].heads


def test_six_heads_of_a_fused_projection_are_split_whole():
    assert run_on_ranks(custom_model, 4) == [2, 2, 1, 1]
