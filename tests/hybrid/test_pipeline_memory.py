"""When a stage of a pipeline asks for what it needs, sends, and frees what it has sent."""

from __future__ import annotations

import itertools
import weakref

import pytest
import torch
from residual_stack import Stack

from booster_hybrid.config import PipelineConfig
from booster_hybrid.pipeline.cut import StagedModel, share_layers
from booster_hybrid.pipeline.runtime import PipelineRun
from booster_hybrid.pipeline.schedule import make_schedule
from booster_hybrid.pipeline.stages import find_cuts


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
        return {"x": torch.ones(2, 8, requires_grad=True)}

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
    """Run a rank's stage of two layers; return what it does in which order, and how much of what it sent is alive."""
    log: list[str] = []
    alive: list[int] = []
    schedule = make_schedule(style, 2, num_microbatches)
    parts = [{"x": torch.ones(2, 8)} for _ in range(num_microbatches)]
    model = Stack()
    model.layers = model.layers[:2]
    cuts = find_cuts(model, ["layers"], parts[0], PipelineConfig(size=2, style=style), trains=True)
    stages = StagedModel(model, cuts, [share_layers(2, 2)[rank]], lambda each: each.dtype)
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: log.append("compute"))

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
