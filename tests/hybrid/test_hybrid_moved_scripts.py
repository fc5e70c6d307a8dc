"""What scripts that have moved from Colossal-AI ask of their plugin, and what the answers are."""

import pytest
import torch.distributed as dist
from ranked import on_ranks

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_hybrid.mesh import PipelinePosition
from booster_testing.models import tiny_llama


@on_ranks(4)
def test_sizes_groups_and_stages_are_those_of_the_mesh():
    rank, ranks_of = dist.get_rank(), dist.get_process_group_ranks
    plugin = HybridParallelPlugin(pp_size=2, zero_stage=1, num_microbatches=2)
    Booster("cpu", plugin=plugin).boost(tiny_llama(num_hidden_layers=4))
    assert (plugin.dp_size, plugin.pp_size, plugin.sp_size, plugin.tp_size, plugin.zero_stage) == (2, 2, 1, 1, 1)
    manager, is_last = plugin.stage_manager, rank % 2 == 1
    assert (manager.stage, manager.num_stages) == (rank % 2, 2)
    assert (manager.is_first_stage(), manager.is_last_stage()) == (not is_last, is_last)
    assert ranks_of(plugin.pp_group) == ([0, 1] if rank < 2 else [2, 3])
    assert ranks_of(plugin.dp_group) == ([1, 3] if is_last else [0, 2])
    assert ranks_of(plugin.tp_group) == ranks_of(plugin.sp_group) == [rank]
    assert plugin.coordinates["dp"] == rank // 2
    plugin = HybridParallelPlugin(tp_size=2)
    Booster("cpu", plugin=plugin).boost(tiny_llama())
    assert (plugin.dp_size, plugin.pp_size, plugin.sp_size, plugin.tp_size, plugin.zero_stage) == (2, 1, 1, 2, 0)
    assert plugin.stage_manager is None
    assert ranks_of(plugin.tp_group) == ([0, 1] if rank < 2 else [2, 3])


@pytest.mark.parametrize(("style", "expected"), [("interleaved", [False, True]), ("zbv", [True, False])])
@on_ranks(2)
def test_the_last_stage_is_on_the_rank_that_gets_the_loss(style, expected):
    plugin = HybridParallelPlugin(pp_size=2, pp_style=style)
    assert plugin.stage_manager.is_last_stage() == expected[dist.get_rank()]


@pytest.mark.parametrize("name", ["dp_size", "coordinates", "stage_manager"])
def test_mesh_attributes_need_the_process_group(name):
    with pytest.raises(ConfigError, match=rf"`plugin\.{name}` needs the process group. Ask for it after `launch"):
        getattr(HybridParallelPlugin(pp_size=2), name)


def test_what_a_script_can_not_see_of_chunks_is_refused():
    position = PipelinePosition(stage=0, num_stages=2, first=0, last=1)
    for ask in (position.is_first_stage, position.is_last_stage):
        with pytest.raises(ConfigError, match="the answer is about all stages of this rank"):
            ask(ignore_chunk=False)
