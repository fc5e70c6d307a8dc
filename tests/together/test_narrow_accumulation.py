"""Gradients of many micro-batches in bf16 add up in fp32 under every plugin: a sum in bf16 soon stops growing."""

import contextlib
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from cases import Setting
from matrix import matrix
from plugin_runs import RUNS, runs
from ranked import on_ranks
from torch import nn

from booster_gemini import GeminiPlugin
from booster_hybrid import DataParallelConfig, HybridParallelPlugin
from booster_runtime import full_gradient
from booster_testing.compare import Tolerance, assert_same_tensors
from booster_zero import LowLevelZeroPlugin

ROUNDED_ONCE = Tolerance(relative=2**-8, reason="sums in fp32 that travel in bf16, which rounds once")
MICRO_BATCHES = 256


PLUGINS = {
    **runs("ddp", "fsdp", "zero2"),
    "gemini": Setting(GeminiPlugin, {"min_chunk_bytes": 256}),
    "zero 1": RUNS["zero1"],
    "zero 1, replicas": Setting(LowLevelZeroPlugin, {"replica_size": 2}),
    "hybrid, zero 0": Setting(HybridParallelPlugin, {"zero_stage": 0}),
    "hybrid, zero 1": RUNS["hybrid-dp"],
    "hybrid, zero3": RUNS["zero3"],
}


def make_net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 4))


def micro_batch(micro, rank):
    return torch.rand(1, 8, generator=torch.Generator().manual_seed(2 * micro + rank)) + 0.5


@matrix(["zero 1, replicas", "hybrid, zero 0"], plugin=list(PLUGINS))
@on_ranks(2)
def test_gradients_of_many_micro_batches_equal_a_sum_in_fp32(plugin):
    """Compare with the mean over ranks of the sums of each micro-batch's gradients, as one process computes them."""
    net = make_net().bfloat16()
    expected = {name: torch.zeros(p.shape) for name, p in net.named_parameters()}
    for rank in range(2):
        for micro in range(MICRO_BATCHES):
            with torch.autocast("cpu", torch.bfloat16):
                loss = net(micro_batch(micro, rank)).sum()
            loss.backward()
            for name, parameter in net.named_parameters():
                expected[name] += parameter.grad.float() / 2
            net.zero_grad()
    net = make_net()
    booster = replace(PLUGINS[plugin], precision="bf16").make_booster()
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for micro in range(MICRO_BATCHES):
        with booster.no_sync(model, optimizer) if micro < MICRO_BATCHES - 1 else contextlib.nullcontext():
            booster.backward(model(micro_batch(micro, dist.get_rank())).sum(), optimizer)
    found = {name: full_gradient(booster, model, name).float() for name in expected}
    assert_same_tensors(found, expected, ROUNDED_ONCE)


@pytest.mark.parametrize(
    "setting",
    [
        Setting(LowLevelZeroPlugin, {"replica_size": 2, "communication_dtype": "bf16"}),
        Setting(HybridParallelPlugin, {"ddp": DataParallelConfig(communication_dtype="bf16")}),
    ],
    ids=["zero, a replica each", "hybrid"],
)
@on_ranks(2)
def test_means_over_replicas_are_rounded_once_whatever_number_of_backward_passes_they_sum(setting):
    # bf16 keeps 8 bits: 384 and 1.5 are exact, 385.5 is not.
    booster = setting.make_booster()
    layer = nn.Linear(1, 1, bias=False)
    model, optimizer, *_ = booster.boost(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    found = []
    for size in (256.0, 1.0, 1.0, 0.25):
        booster.backward(model(torch.full((1, 1), size + dist.get_rank() * size)).sum(), optimizer)
        found.append(float(full_gradient(booster, model, "weight")))
    assert found == [384.0, 385.5, 387.0, 387.375]
