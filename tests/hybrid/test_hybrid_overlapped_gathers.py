"""Gathers of updated parameters that go on after ``step``, also while layers compute for their siblings.

In these tests a gather hides what it brings: other ranks' parts of a bucket are NaN until it has been waited for.
"""

import pytest
import torch
from hybrid_runs import SPLIT_GATHER
from late_gathers import hidden_until_waited_for
from model_zoo import get_model
from ranked import on_ranks

from booster_core import Booster
from booster_hybrid import HybridParallelPlugin
from booster_testing.compare import EXACT, assert_same_tensors
from booster_testing.training import whole_model
from booster_zero import ZeroConfig


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama_tied", SPLIT_GATHER),
        pytest.param("t5_generation", {"tp_size": 2}, marks=pytest.mark.slow),
        pytest.param("llama", {"pp_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["split_gather", "t5", "pipeline"],
)
@on_ranks(4)
def test_no_parameter_is_read_before_its_gather(name, options):
    is_stepping, num_hidden = False, 0

    def hides(buffer):
        """Hide updated parameters; activations, which tensor parallel ranks gather, are none."""
        nonlocal num_hidden
        is_parameter = buffer.dtype == torch.float32 and is_stepping
        num_hidden += is_parameter
        return is_parameter

    def train(overlaps):
        nonlocal is_stepping
        zoo = get_model(f"transformers/{name}")
        plugin = HybridParallelPlugin(**options, zero=ZeroConfig(bucket_bytes=256, overlap_allgather=overlaps))
        booster = Booster("cpu", plugin=plugin)
        original = zoo.seeded()
        model, optimizer, *_ = booster.boost(original, torch.optim.AdamW(original.parameters(), lr=1e-2))
        rank, _ = plugin.data_parallel_coordinates(booster.context.coordinator)
        losses = []
        for step in range(3):
            batch = zoo.share(step, rank, 4)
            if "pp_size" in options:
                result = booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)
                loss = result["loss"]
            else:
                loss = zoo.loss_of(model, batch)
                booster.backward(loss, optimizer)
            losses.append(None if loss is None else float(loss.detach()))
            is_stepping = True
            optimizer.step()
            is_stepping = False
            optimizer.zero_grad()
        return losses, whole_model(booster, model)

    plain_losses, plain = train(overlaps=False)
    with hidden_until_waited_for(hides):
        losses, found = train(overlaps=True)
    assert num_hidden > 0
    assert losses == plain_losses
    assert_same_tensors(found, plain, EXACT)
