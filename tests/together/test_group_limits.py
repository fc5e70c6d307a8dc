"""Process groups of strategies wait for missing ranks as long as the run was launched to, not as long as torch does."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranked import on_ranks

from booster_core import Booster
from booster_fsdp import TorchFSDPPlugin
from booster_hybrid import HybridParallelPlugin
from booster_testing.models import TinyMLP, tiny_llama
from booster_zero import LowLevelZeroPlugin

SECONDS = 17.0


@pytest.mark.parametrize(
    ("make_plugin", "make_model", "options", "world_size"),
    [
        (HybridParallelPlugin, partial(tiny_llama, tie_word_embeddings=True), {"pp_size": 2}, 4),
        (HybridParallelPlugin, tiny_llama, {"tp_size": 2, "zero_stage": 1}, 4),
        (LowLevelZeroPlugin, TinyMLP, {"replica_size": 2}, 4),
        (TorchFSDPPlugin, TinyMLP, {"replica_size": 2}, 4),
    ],
    ids=["hybrid-pp", "hybrid-tp", "zero-replicas", "fsdp-replicas"],
)
@on_ranks("world_size", group_timeout_seconds=SECONDS)
def test_groups_have_the_time_limit_of_the_run(make_plugin, make_model, options, world_size):
    before = set(dist.distributed_c10d._world.pg_map)
    model = make_model()
    booster = Booster("cpu", plugin=make_plugin(**options))
    booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    new = [group for group in dist.distributed_c10d._world.pg_map if group not in before]
    limits = {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in new}
    assert limits == {SECONDS}
