"""`join`: ranks with uneven numbers of batches end together, and steps follow the ranks that have some left."""

from __future__ import annotations

import torch
from matrix import matrix
from uneven_runs import NUM_BATCHES, batches_of, make, square, train_plainly

from booster_core import Booster
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin, ShardingPolicy
from booster_runtime import join
from booster_testing import run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_zero import LowLevelZeroPlugin

POLICY = ShardingPolicy(layers=("layers",))
PLUGINS = {
    "ddp": (2, TorchDDPPlugin, {}),
    "fsdp": (2, TorchFSDPPlugin, {}),
    "zero": (2, LowLevelZeroPlugin, {"stage": 2}),
    "gemini": (2, GeminiPlugin, {"min_chunk_bytes": 8192}),
    "hybrid-dp": (2, HybridParallelPlugin, {}),
    "hybrid-pp": (4, HybridParallelPlugin, {"pp_size": 2, "custom_policy": POLICY, "example_batch": torch.ones(2, 8)}),
}


def boosted(name):
    booster = Booster("cpu", plugin=PLUGINS[name][1](**PLUGINS[name][2]))
    model, optimizer, *_ = booster.boost(*make())
    index, _ = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    return booster, model, optimizer, index


def train(name, folder):
    booster, model, optimizer, index = boosted(name)
    joined = join(booster, batches_of(index))
    count = 0
    if name == "hybrid-pp":
        while True:
            try:
                booster.execute_pipeline(joined, model, square, optimizer)
            except StopIteration:
                break
            optimizer.step()
            optimizer.zero_grad()
            count += 1
    else:
        for x in joined:
            booster.backward(square(model(x), None), optimizer)
            optimizer.step()
            optimizer.zero_grad()
            count += 1
    booster.save_model(model, folder, shard=True)
    return count


@matrix(["zero"], name=PLUGINS)
def test_steps_follow_the_ranks_that_have_batches(name, tmp_path):
    from safetensors.torch import load_file

    num_ranks = PLUGINS[name][0]
    assert run_on_ranks(train, num_ranks, name, str(tmp_path)) == [max(NUM_BATCHES)] * num_ranks
    found = {key: values for file in tmp_path.glob("*.safetensors") for key, values in load_file(file).items()}
    assert_same_tensors(found, train_plainly(), tolerance_for(torch.float32))


def evaluate():
    booster, model, _, index = boosted("zero")
    model.eval()
    with torch.no_grad():
        return sum(len(model(x)) for x in join(booster, iter(batches_of(index))))


def test_evaluation_ends_together():
    assert run_on_ranks(evaluate, 2) == [10, 10]
