"""A pipeline keeps as many activations at a time as its schedule promises, and none longer than it needs them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from kept_activations import Kept, Layers

from booster_hybrid.config import PipelineConfig
from booster_hybrid.pipeline.cut import StagedModel, share_layers
from booster_hybrid.pipeline.p2p import P2PChannel, make_channels
from booster_hybrid.pipeline.runtime import PipelineRun
from booster_hybrid.pipeline.schedule import make_schedule
from booster_hybrid.pipeline.stages import find_cuts
from booster_hybrid.pipeline.weight_gradients import SplitBackward
from booster_testing import run_on_ranks


class CountingLink(P2PChannel):
    """Counts the messages whose tensors are kept alive."""

    kept = peak = 0

    def send(self, tensors, to, kind):
        self.kept += 1
        self.peak = max(self.peak, self.kept)
        return super().send(tensors, to, kind)

    def release(self, sent):
        self.kept -= 1
        super().release(sent)


def train(style, num_chunks, num_microbatches):
    """Return the activations that were alive at one time, what the run counted, what is left, and messages kept."""
    rank, size = dist.get_rank(), dist.get_world_size()
    kept = Kept()
    schedule = make_schedule(style, size, num_microbatches, num_chunks)
    model = Layers(schedule.placement.num_stages, kept)
    parts = [{"x": torch.ones(2, 4)} for _ in range(num_microbatches)]
    split = SplitBackward(model)
    config = PipelineConfig(size=size, style=style, num_model_chunks=num_chunks)
    cuts = find_cuts(model, ["layers"], parts[0], config, trains=True)
    ranges = share_layers(len(cuts.trace.layers), schedule.placement.num_stages)
    stages = StagedModel(
        model, cuts, [ranges[stage] for stage in schedule.placement.stages_of(rank)], lambda each: each.dtype
    )
    link = CountingLink(["x"], range(size), rank, make_channels([range(size)]), torch.device("cpu"))
    kept.peak = kept.live = 0
    weights = [1 / num_microbatches] * num_microbatches

    def backward(tensors, gradients, is_last):
        del is_last
        torch.autograd.backward(tensors, gradients)

    run = PipelineRun(
        stages, schedule, rank, link, parts, weights, lambda outputs, _: outputs.sum(), backward, split=split
    )
    run.run()
    return kept.peak, run.peak_live, kept.live, link.peak


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
    assert [counted for _, counted, *_ in of_ranks] == promised
    assert [left for _, _, left, _ in of_ranks] == [0, 0, 0, 0]


def test_the_zero_bubble_v_keeps_as_much_as_1f1b_s_first_rank_on_each_rank():
    of_ranks = run_on_ranks(train, 4, "zbv", 2, 10)
    # Chunks are half as large as 1F1B's stages. What no weight needs is freed before the weights' turn.
    assert max(counted for _, counted, *_ in of_ranks) <= 8
    assert all(peak <= counted for peak, counted, *_ in of_ranks)
    assert [left for _, _, left, _ in of_ranks] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("style", "num_chunks"),
    [
        ("1f1b", 1),
        pytest.param("interleaved", 2, marks=pytest.mark.slow),
        pytest.param("zbv", 2, marks=pytest.mark.slow),
    ],
)
def test_sent_tensors_are_kept_until_received(style, num_chunks):
    few, many = ([sent for *_, sent in run_on_ranks(train, 2, style, num_chunks, count)] for count in (8, 24))
    assert few == many
    assert max(many) <= 8
