"""Each rank of a pipeline writes down what it does when."""

from __future__ import annotations

import itertools

import pytest
import torch
from model_zoo import get_model

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_hybrid.pictures.reading import read_pipelines
from booster_hybrid.pipeline.schedule import make_schedule
from booster_testing import run_on_ranks


def train(folder):
    zoo = get_model("transformers/llama")
    model = zoo.seeded()
    batch = zoo.share(0, 0, 6)
    plugin = HybridParallelPlugin(pp_size=2, num_microbatches=3, example_batch=batch, pipeline_record=folder)
    booster = Booster("cpu", plugin=plugin)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        booster.execute_pipeline(itertools.repeat(batch), boosted, zoo.loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def test_the_record_has_all_actions_of_each_batch_in_their_order(tmp_path):
    run_on_ranks(train, 2, str(tmp_path))
    (pipeline,) = read_pipelines(tmp_path)
    schedule = make_schedule("1f1b", 2, 3)
    assert [batch.number for batch in pipeline.batches] == [0, 1]
    for batch in pipeline.batches:
        for index, rank in enumerate(batch.ranks):
            done = [(each.work, each.stage, each.microbatch) for each in rank.slices]
            assert done == [(each.work.value, each.stage, each.microbatch) for each in schedule.actions(index)]
            times = [moment for each in rank.slices for moment in (each.start, each.stop)]
            assert times == sorted(times)
            assert times[-1] <= batch.seconds
            assert 0 < rank.idle_share(batch.seconds) < 1


def test_a_record_without_a_pipeline_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="`pp_size=1` makes none"):
        HybridParallelPlugin(pipeline_record=tmp_path)
