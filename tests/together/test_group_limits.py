"""Process groups of strategies wait for missing ranks as long as the run was launched to, not as long as torch does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from booster_core import Booster
from booster_fsdp import TorchFSDPPlugin
from booster_hybrid import HybridParallelPlugin
from booster_testing import run_on_ranks
from booster_testing.models import TinyMLP, tiny_llama
from booster_zero import LowLevelZeroPlugin

SECONDS = 17.0


def _limit(group):
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def limits_of_new_groups(make_plugin, make_model, options):
    before = set(dist.distributed_c10d._world.pg_map)
    model = make_model()
    booster = Booster("cpu", plugin=make_plugin(**options))
    booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return [_limit(group) for group in dist.distributed_c10d._world.pg_map if group not in before]


def tied_llama():
    return tiny_llama(tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("make_plugin", "make_model", "options", "world_size"),
    [
        (HybridParallelPlugin, tied_llama, {"pp_size": 2}, 4),
        (HybridParallelPlugin, tiny_llama, {"tp_size": 2, "zero_stage": 1}, 4),
        (LowLevelZeroPlugin, TinyMLP, {"replica_size": 2}, 4),
        (TorchFSDPPlugin, TinyMLP, {"replica_size": 2}, 4),
    ],
    ids=["hybrid-pp", "hybrid-tp", "zero-replicas", "fsdp-replicas"],
)
def test_groups_have_the_time_limit_of_the_run(make_plugin, make_model, options, world_size):
    limits = run_on_ranks(
        limits_of_new_groups, world_size, make_plugin, make_model, options, group_timeout_seconds=SECONDS
    )
    for of_rank in limits:
        assert of_rank
        assert set(of_rank) == {SECONDS}
