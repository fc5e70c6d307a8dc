"""Each rank of a pipeline writes down what it does when."""

import itertools

import torch
from model_zoo import get_model

from booster_core import Booster
from booster_hybrid import HybridParallelPlugin
from booster_hybrid.pipeline.schedule import make_schedule
from booster_runtime.trace import read_traces
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
    slices = [event for event in read_traces(tmp_path) if event["ph"] == "X"]
    schedule = make_schedule("1f1b", 2, 3)
    for rank, number in itertools.product(range(2), range(2)):
        own = [each for each in slices if each["pid"] == rank and each["args"]["batch"] == number]
        (batch,) = (each for each in own if "pipeline" in each["args"])
        assert batch["args"] == {
            "batch": number, "pipeline": 0, "index": rank, "stages": 2, "microbatches": 3,
        }  # fmt: skip
        works = [each for each in own if "stage" in each["args"]]
        done = [(each["name"], each["args"]["stage"], each["args"]["microbatch"]) for each in works]
        actions = schedule.actions(rank)
        assert done == [(f"{each.work.value} {each.microbatch}", each.stage, each.microbatch) for each in actions]
        times = [moment for each in works for moment in (each["ts"], each["ts"] + each["dur"])]
        assert times == sorted(times)
        assert batch["ts"] <= times[0]
        assert times[-1] <= batch["ts"] + batch["dur"]
