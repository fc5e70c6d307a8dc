"""Each rank of a pipeline writes down what it does when."""

import itertools

import torch.distributed as dist
from hybrid_runs import boosted
from model_zoo import get_model
from ranked import on_ranks

from booster_hybrid.pipeline.schedule import make_schedule
from booster_runtime.trace import read_traces


@on_ranks(2)
def test_the_record_has_all_actions_of_each_batch_in_their_order(tmp_path):
    zoo, rank = get_model("transformers/llama"), dist.get_rank()
    batch = zoo.share(0, 0, 6)
    options = {"pp_size": 2, "num_microbatches": 3, "pipeline_record": str(tmp_path)}
    booster, model, optimizer = boosted(zoo.seeded(), example_batch=batch, **options)
    for _ in range(2):
        booster.execute_pipeline(itertools.repeat(batch), model, zoo.loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    slices = [event for event in read_traces(tmp_path) if event["ph"] == "X" and event["pid"] == rank]
    schedule = make_schedule("1f1b", 2, 3)
    for number in range(2):
        own = [each for each in slices if each["args"]["batch"] == number]
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
