"""`join`: ranks with uneven numbers of batches end together, and steps follow the ranks that have some left."""

from __future__ import annotations

import torch
from matrix import matrix
from uneven_runs import assert_steps_follow_batches, batches_of, boosted

from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin, ShardingPolicy
from booster_runtime import join
from booster_testing import run_on_ranks
from booster_zero import LowLevelZeroPlugin

PIPELINE = {"pp_size": 2, "custom_policy": ShardingPolicy(layers=("layers",)), "example_batch": {"x": torch.ones(2, 8)}}
PLUGINS = {
    "ddp": (2, TorchDDPPlugin, {}),
    "fsdp": (2, TorchFSDPPlugin, {}),
    "zero": (2, LowLevelZeroPlugin, {"stage": 2}),
    "gemini": (2, GeminiPlugin, {"min_chunk_bytes": 8192}),
    "hybrid-dp": (2, HybridParallelPlugin, {}),
    "hybrid-pp": (4, HybridParallelPlugin, PIPELINE),
}


@matrix(["zero"], name=PLUGINS)
def test_steps_follow_the_ranks_that_have_batches(name):
    num_ranks, plugin_class, options = PLUGINS[name]
    assert_steps_follow_batches(plugin_class(**options), num_ranks, in_pipeline="pp_size" in options)


def evaluate():
    booster, model, _, index = boosted(LowLevelZeroPlugin(stage=2))
    model.eval()
    with torch.no_grad():
        return sum(len(model(x)) for x in join(booster, iter(batches_of(index))))


def test_evaluation_ends_together():
    assert run_on_ranks(evaluate, 2) == [10, 10]
