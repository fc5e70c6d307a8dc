"""What can't be had is told on every rank, with the values that were asked for and those that would do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from model_zoo import get_model
from ranked import raises_on_ranks
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin, ShardingPolicy
from booster_testing import expect_on_ranks

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


@raises_on_ranks(
    ConfigError, r"disagree about `custom_policy`: ShardingPolicy\(rules=\(\), layers=\('layers',\).* on rank 0,", 2
)
def test_ranks_with_different_policies_are_named():
    options = {"pp_size": 2, "example_batch": torch.zeros(2, 4)}
    name = "blocks" if dist.get_rank() else "layers"
    boost({**options, "custom_policy": ShardingPolicy(layers=(name,))}, Custom())


def own_loss(outputs, _):
    return outputs.loss


def execute(batch, options):
    booster, model, optimizer = boost({"pp_size": 2, **options})
    return booster.execute_pipeline(iter([batch]), model, own_loss, optimizer)


def tokens(samples):
    return torch.zeros(samples, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        pytest.param(
            {"input_ids": tokens(4), "labels": tokens(3)},
            {},
            r"must have one entry per sample .*\['input_ids'\] \(4, 4\)",
            marks=pytest.mark.slow,
        ),
        pytest.param({"input_ids": None}, {}, "must have one entry per sample .* got `dict`", marks=pytest.mark.slow),
        pytest.param(
            {"input_ids": tokens(1), "labels": tokens(1)},
            {},
            r"batch of 1 sample\(s\) can't be split into `num_micro",
            marks=pytest.mark.slow,
        ),
        ({"input_ids": tokens(2)}, {"num_microbatches": 3}, r"batch of 2 sample\(s\) can't be .*num_microbatches=3`"),
    ],
)
def test_a_batch_that_cannot_be_split_raises_on_every_rank(batch, options, message):
    expect_on_ranks(ConfigError, message, execute, 2, batch, options)
