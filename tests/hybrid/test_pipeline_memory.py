"""A pipeline keeps as many activations as its schedule promises, and asks for what it needs before it computes."""

from __future__ import annotations

import itertools
import weakref

import pytest
import torch
import torch.distributed as dist
from kept_activations import Kept, Layers
from torch import nn

from booster_hybrid.config import PipelineConfig
from booster_hybrid.pipeline.cut import StagedModel, share_layers
from booster_hybrid.pipeline.p2p import P2PChannel, make_channels
from booster_hybrid.pipeline.runtime import PipelineRun
from booster_hybrid.pipeline.schedule import make_schedule
from booster_hybrid.pipeline.stages import find_cuts
from booster_hybrid.pipeline.weight_gradients import SplitBackward
from booster_testing import run_on_ranks


def staged(model, schedule, rank, config, part):
    """Return a rank's stages of a model."""
    cuts = find_cuts(model, ["layers"], part, config, trains=True)
    ranges = share_layers(len(cuts.trace.layers), schedule.placement.num_stages)
    return StagedModel(
        model, cuts, [ranges[each] for each in schedule.placement.stages_of(rank)], lambda each: each.dtype
    )


def train(style, num_chunks, num_microbatches):
    """Return the activations that were alive at one time, what the run counted, and what is left."""
    rank, size = dist.get_rank(), dist.get_world_size()
    kept = Kept()
    schedule = make_schedule(style, size, num_microbatches, num_chunks)
    model = Layers(schedule.placement.num_stages, kept)
    parts = [{"x": torch.ones(2, 4)} for _ in range(num_microbatches)]
    split = SplitBackward(model)
    config = PipelineConfig(size=size, style=style, num_model_chunks=num_chunks)
    stages = staged(model, schedule, rank, config, parts[0])
    link = P2PChannel(["x"], range(size), rank, make_channels([range(size)]), torch.device("cpu"))
    kept.peak = kept.live = 0
    weights = [1 / num_microbatches] * num_microbatches

    def backward(tensors, gradients, is_last):
        del is_last
        torch.autograd.backward(tensors, gradients)

    run = PipelineRun(
        stages, schedule, rank, link, parts, weights, lambda outputs, _: outputs.sum(), backward, split=split
    )
    run.run()
    return kept.peak, run.peak_live, kept.live


@pytest.mark.parametrize(
    ("style", "num_chunks", "num_microbatches", "promised"),
    [
        pytest.param("gpipe", 1, 6, [6, 6, 6, 6], marks=pytest.mark.slow),
        pytest.param("1f1b", 1, 6, [4, 3, 2, 1], marks=pytest.mark.slow),
        ("1f1b", 1, 3, [3, 3, 2, 1]),
        pytest.param("interleaved", 2, 8, [11, 9, 7, 5], marks=pytest.mark.slow),
    ],
)
def test_peak_activations_match_the_schedule(style, num_chunks, num_microbatches, promised):
    of_ranks = run_on_ranks(train, 4, style, num_chunks, num_microbatches)
    assert [peak for peak, *_ in of_ranks] == promised
    assert [counted for _, counted, _ in of_ranks] == promised
    assert [left for *_, left in of_ranks] == [0, 0, 0, 0]


def test_the_zero_bubble_v_keeps_as_much_as_1f1b_s_first_rank_on_each_rank():
    of_ranks = run_on_ranks(train, 4, "zbv", 2, 10)
    # Chunks are half as large as 1F1B's stages. What no weight needs is freed before the weights' turn.
    assert max(counted for _, counted, *_ in of_ranks) <= 8
    assert all(peak <= counted for peak, counted, *_ in of_ranks)
    assert [left for *_, left in of_ranks] == [0, 0, 0, 0]


# ---- when it sends, receives and frees


class Logged(nn.Module):
    def __init__(self, log):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        for layer in self.layers:
            layer.register_forward_pre_hook(lambda *_: log.append("compute"))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class StandIn:
    """In place of the other ranks: answers at once, and writes down what is asked of it."""

    def __init__(self, log):
        self.log = log
        self.num_expected = 0
        self.sent = []

    def expect(self, sender, kind):
        del sender, kind
        self.num_expected += 1
        self.log.append("expect")

    def receive(self, sender):
        del sender
        self.log.append("receive")
        return {"input": torch.ones(2, 4, requires_grad=True)}

    def send(self, tensors, to, kind):
        del to, kind
        self.sent += map(weakref.ref, tensors.values())
        self.log.append("send")
        return object()

    def release(self, sent):
        del sent
        self.log.append("release")

    def finish(self):
        self.log.append("finish")


def run(style, rank, num_microbatches=4):
    log: list[str] = []
    alive: list[int] = []
    schedule = make_schedule(style, 2, num_microbatches)
    parts = [{"x": torch.ones(2, 4)} for _ in range(num_microbatches)]
    stages = staged(Logged(log), schedule, rank, PipelineConfig(size=2, style=style), parts[0])
    log.clear()

    def backward(tensors, gradients, is_last):
        del is_last
        log.append("compute")
        alive.append(sum(each() is not None for each in link.sent))
        torch.autograd.backward(tensors, gradients)

    link = StandIn(log)
    weights = [1 / num_microbatches] * num_microbatches
    pipeline = PipelineRun(stages, schedule, rank, link, parts, weights, lambda outputs, _: outputs.sum(), backward)
    pipeline.run()
    assert pipeline.error is None
    return log, alive


@pytest.mark.parametrize("style", ["gpipe", "1f1b"])
@pytest.mark.parametrize("rank", [0, 1])
def test_receives_are_posted_before_the_preceding_compute(style, rank):
    log, _ = run(style, rank)
    assert log[0] == "expect"
    asked = 0
    for before, event in itertools.pairwise(log):
        asked += before == "expect"
        if event == "receive":
            assert asked > 0, log
            asked -= 1
    assert log.count("expect") == log.count("receive") == 4


@pytest.mark.parametrize("style", ["gpipe", "1f1b"])
@pytest.mark.parametrize("rank", [0, 1])
def test_sends_are_waited_for_only_after_their_receipt(style, rank):
    log, _ = run(style, rank)
    assert log.count("send") == 4
    assert log.index("finish") == len(log) - 1
    for place, event in enumerate(log):
        if event == "release":
            # A message that came in from the receiver shows how far that rank has come.
            assert "receive" in log[max(0, place - 4) : place], log
    sends = [place for place, event in enumerate(log) if event == "send"]
    assert all(log[place + 1] != "release" for place in sends)


@pytest.mark.parametrize("rank", [0, 1])
def test_sent_tensors_are_kept_until_received(rank):
    for num_microbatches in (8, 24):
        log, _ = run("1f1b", rank, num_microbatches)
        kept = itertools.accumulate({"send": 1, "release": -1}.get(event, 0) for event in log)
        assert max(kept) == 2


@pytest.mark.parametrize("style", ["gpipe", "1f1b"])
def test_what_a_stage_has_sent_is_freed_before_its_backward(style):
    _, alive = run(style, 0)
    assert alive == [0] * 4
