"""Gathers of updated parameters that go on after ``step``, also while layers compute for their siblings.

In these tests a gather hides what it brings: other ranks' parts of a bucket are NaN until it has been waited for.
"""

import contextlib

import pytest
import torch
from late_gathers import hidden_until_waited_for
from model_zoo import get_model

from booster_core import Booster
from booster_hybrid import HybridParallelPlugin
from booster_testing import run_on_ranks
from booster_testing.compare import EXACT, assert_same_tensors
from booster_testing.training import whole_model
from booster_zero import ZeroConfig

STEPS = 3


class Seen:
    """Counts gathers of updated parameters; activations, which tensor parallel ranks gather, are none."""

    is_stepping = False
    number = 0

    def hides(self, buffer):
        is_parameter = buffer.dtype == torch.float32 and self.is_stepping
        self.number += is_parameter
        return is_parameter


def train(name, options, overlaps):
    zoo = get_model(name)
    plugin = HybridParallelPlugin(**options, zero=ZeroConfig(bucket_bytes=256, overlap_allgather=overlaps))
    booster = Booster("cpu", plugin=plugin)
    original = zoo.seeded()
    model, optimizer, *_ = booster.boost(original, torch.optim.AdamW(original.parameters(), lr=1e-2))
    rank, _ = plugin.data_parallel_coordinates(booster.context.coordinator)
    seen, losses = Seen(), []
    with hidden_until_waited_for(seen.hides) if overlaps else contextlib.nullcontext():
        for step in range(STEPS):
            batch = zoo.share(step, rank, 4)
            if options.get("pp_size", 1) > 1:
                result = booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)
                loss = result["loss"]
            else:
                loss = zoo.loss_of(model, batch)
                booster.backward(loss, optimizer)
            losses.append(None if loss is None else float(loss.detach()))
            seen.is_stepping = True
            optimizer.step()
            seen.is_stepping = False
            optimizer.zero_grad()
    assert bool(seen.number) == overlaps
    return losses, whole_model(booster, model)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama_tied", {"tp_size": 2, "sequence_parallelism_mode": "split_gather"}),
        pytest.param("t5_generation", {"tp_size": 2}, marks=pytest.mark.slow),
        pytest.param("llama", {"pp_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["split_gather", "t5", "pipeline"],
)
def test_no_parameter_is_read_before_its_gather(name, options):
    runs = [run_on_ranks(train, 4, f"transformers/{name}", options, overlaps) for overlaps in (False, True)]
    for (plain_losses, plain), (losses, found) in zip(*runs, strict=True):
        assert losses == plain_losses
        assert_same_tensors(found, plain, EXACT)
