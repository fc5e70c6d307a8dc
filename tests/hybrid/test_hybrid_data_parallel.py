"""Orders of the mesh and options of data parallelism: what they change, and that results stay those of one process."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Setting, assert_equals_one_process, zoo_case
from hybrid_runs import RING, boosted
from log_records import Records
from matrix import matrix
from ranked import on_ranks
from residual_stack import Stack
from torch import nn

from booster_core import Booster
from booster_hybrid import DataParallelConfig, HybridParallelPlugin, ShardingPolicy

CASE = zoo_case("transformers/llama_tied", steps=2)
TP_PP = {"tp_size": 2, "pp_size": 2}

ORDERS = {
    "tp2pp2": (4, TP_PP, ("tp", "sp", "pp", "dp")),
    "tp2dp2zero1": (4, {"tp_size": 2, "zero_stage": 1}, ("tp", "sp", "dp", "pp")),
    "pp2dp2zero2": (4, {"pp_size": 2, "zero_stage": 2}, ("pp", "dp", "sp", "tp")),
    "tp2pp2dp2zero1": (8, {**TP_PP, "zero_stage": 1}, ("pp", "tp", "dp", "sp")),
    "tp2pp2dp2": (8, TP_PP, ("dp", "tp", "pp", "sp")),
    "sp2tp2dp2zero2": (8, {**RING, "tp_size": 2, "zero_stage": 2}, ("sp", "tp", "pp", "dp")),
}


@matrix(["tp2dp2zero1"], mesh=ORDERS)
def test_any_order_of_the_mesh_trains_and_saves_as_one_process(mesh, tmp_path):
    """Go on in the usual order from what another one has saved."""
    num_ranks, options, order = ORDERS[mesh]
    settings = [Setting(HybridParallelPlugin, each, num_ranks) for each in ({**options, "mesh_order": order}, options)]
    assert_equals_one_process(CASE, settings[0], checkpoint=tmp_path / "run", then=settings[1])


@pytest.mark.parametrize(("size", "num_meetings"), [(2, 5), (4, 1)])
@on_ranks(4)
def test_no_batch_of_a_pipeline_lets_all_ranks_meet_but_to_end_it(size, num_meetings):
    """Stages of a replica meet, and replicas, before the batch and after it; and those that sum one bucket.

    Stages that are all ranks tell each other of the batch in turn.
    """
    from booster_runtime import collectives

    torch.manual_seed(0)
    batch = {"x": torch.ones(4, 8)}
    options = {"num_microbatches": 4, "custom_policy": ShardingPolicy(layers=("layers",)), "example_batch": batch}
    booster, model, optimizer = boosted(Stack(), pp_size=size, **options)
    met: list[tuple[str, int]] = []

    def noted(name, original, *args, **options):
        group = next((each for each in (*args, *options.values()) if isinstance(each, dist.ProcessGroup)), None)
        met.append((name, dist.get_world_size(group)))
        return original(*args, **options)

    def step():
        booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.square().mean(), optimizer)

    step()
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "all_gather_object")
    with mock.patch.multiple(collectives, **{name: partial(noted, name, getattr(collectives, name)) for name in names}):
        step()
    assert met == [("all_reduce", size)] * num_meetings


@pytest.mark.parametrize(
    ("options", "num_ranks", "number"),
    [
        (None, 2, 1),
        ({"zero_stage": 0}, 2, 1),
        ({"ddp": DataParallelConfig()}, 2, 1),
        ({"tp_size": 2}, 2, 0),
        (None, 1, 0),
    ],
)
@on_ranks("num_ranks")
def test_a_plugin_that_splits_nothing_says_so_once(options, num_ranks, number):
    booster = Booster("cpu", plugin="hybrid" if options is None else HybridParallelPlugin(**options))
    with Records() as records:
        for _ in range(2):
            model = CASE.make()[0] if "tp_size" in (options or {}) else nn.Linear(4, 4)
            booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    warnings = [text for text in records.texts if "splits nothing" in text]
    assert len(warnings) == (number if dist.get_rank() == 0 else 0)
    assert all(name in each for each in warnings for name in ("tp_size", "pp_size", "sp_size", "zero_stage"))
    assert ("splits='nothing, as under plugin 'ddp''" in booster.describe().replace('"', "'")) == bool(number)
