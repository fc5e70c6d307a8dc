"""``torch.compile`` of models in stages: the losses of eager training, or a refusal."""

from __future__ import annotations

import pytest
import torch
from compiled_ways import blocks, in_place, layers, whole
from compiler_warnings import ignore_compiler_warnings

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.models import tiny_llama

PIPELINE = {"pp_size": 2}


def wrapped_layers(model):
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, backend="aot_eager")
    return model


def train(options, before=None, after=None):
    ignore_compiler_warnings()
    torch.manual_seed(0)
    model = tiny_llama(num_hidden_layers=2)
    model = model if before is None else before(model)
    booster = Booster("cpu", plugin=HybridParallelPlugin(**options))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    model = model if after is None else after(model)
    losses = []
    for step in range(3):
        tokens = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(step))
        batch = {"input_ids": tokens, "labels": tokens}
        if "pp_size" in options:
            loss = booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)["loss"]
        else:
            outputs = model(**batch)
            loss = outputs.loss + outputs.logits.softmax(-1).square().sum(-1).mean()
            booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(None if loss is None else float(loss.detach()))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(layers, None), (blocks, None), (wrapped_layers, None), (None, layers)])
def test_a_pipeline_of_compiled_parts_trains_as_eager_does(before, after):
    (_, expected), (_, found) = run_on_ranks(train, 2, PIPELINE), run_on_ranks(train, 2, PIPELINE, before, after)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("how", [whole, in_place])
def test_a_model_that_was_compiled_as_a_whole_is_not_cut(how):
    expect_on_ranks(
        ConfigError, r"Compile its layers instead, for example .*layer\.compile\(\)", train, 2, PIPELINE, how
    )
