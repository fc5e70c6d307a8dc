"""Replicas of shards: when gradients are averaged over them, in which order and how often.

The conformance kit has their values.
"""

import contextlib
from unittest import mock

import pytest
import torch
from cases import Setting
from ranked import on_ranks
from torch import nn

from booster_gemini import GeminiPlugin
from booster_runtime import collectives
from booster_zero import LowLevelZeroPlugin

WIDTH, DEPTH, RANKS = 16, 6, 4
LAYER_BYTES = WIDTH * WIDTH * 4
PLUGINS = {
    "stage 1": Setting(LowLevelZeroPlugin, {"replica_size": 2, "bucket_bytes": LAYER_BYTES}, RANKS),
    "stage 2": Setting(LowLevelZeroPlugin, {"stage": 2, "replica_size": 2, "bucket_bytes": LAYER_BYTES}, RANKS),
    "gemini": Setting(GeminiPlugin, {"replica_size": 2, "min_chunk_bytes": LAYER_BYTES}, RANKS),
}


def order_of_a_step(plugin, micro_batches):
    """Return what is started in the third step, up to its end of backward and after that."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)]
    model = nn.Sequential(*(module for layer in layers for module in (layer, nn.Tanh())))
    booster = PLUGINS[plugin].make_booster()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    events = []

    def noting(event, original):
        def call(tensor, *args, **kwargs):
            if event == "reduce" or tensor.is_floating_point():
                events.append(event)
            return original(tensor, *args, **kwargs)

        return call

    reduce, average = noting("reduce", collectives.reduce_scatter), noting("average", collectives.all_reduce)
    for _ in range(3):
        events.clear()
        with mock.patch.multiple(collectives, reduce_scatter=reduce, all_reduce=average):
            for micro in range(micro_batches):
                with booster.no_sync(model) if micro < micro_batches - 1 else contextlib.nullcontext():
                    booster.backward(model(torch.randn(2, WIDTH)).square().sum(), optimizer)
            events.append("end")
            optimizer.step()
            optimizer.zero_grad()
    return events


@pytest.mark.parametrize("plugin", PLUGINS)
@on_ranks(RANKS)
def test_a_bucket_is_averaged_over_replicas_while_backward_runs(plugin):
    # Two are underway at once: the third reduction waits for the first, which is averaged next.
    rest = ["reduce", "average"] * (DEPTH - 2)
    assert order_of_a_step(plugin, 1) == ["reduce", "reduce", *rest, "average", "average", "end"]


@pytest.mark.parametrize(("plugin", "reductions"), [("stage 1", 1), ("stage 2", 3), ("gemini", 3)])
@on_ranks(RANKS)
def test_accumulated_gradients_are_averaged_over_replicas_once(plugin, reductions):
    order = order_of_a_step(plugin, 3)
    assert order.count("average") == DEPTH
    assert order.count("reduce") == reductions * DEPTH
