"""What scripts that have moved from Colossal-AI ask of their plugin, and what the answers are."""

import pytest
import torch.distributed as dist

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_hybrid.mesh import PipelinePosition
from booster_testing import run_on_ranks
from booster_testing.models import tiny_llama


def answers(options):
    """Return what a plugin says of each rank, after the model was boosted."""
    plugin = HybridParallelPlugin(**options)
    Booster("cpu", plugin=plugin).boost(tiny_llama(num_hidden_layers=4))
    manager = plugin.stage_manager
    assert plugin.coordinates["dp"] == dist.get_process_group_ranks(plugin.dp_group).index(dist.get_rank())
    return {
        "sizes": (plugin.dp_size, plugin.pp_size, plugin.sp_size, plugin.tp_size, plugin.zero_stage),
        "stage": manager and (manager.stage, manager.num_stages, manager.is_first_stage(), manager.is_last_stage()),
        **{
            axis: tuple(dist.get_process_group_ranks(getattr(plugin, f"{axis}_group")))
            for axis in ("dp", "pp", "sp", "tp")
        },
    }


def test_sizes_groups_and_stages_are_those_of_the_mesh():
    found = run_on_ranks(answers, 4, {"pp_size": 2, "zero_stage": 1, "num_microbatches": 2})
    assert [each["sizes"] for each in found] == [(2, 2, 1, 1, 1)] * 4
    assert [each["stage"] for each in found] == [(0, 2, True, False), (1, 2, False, True)] * 2
    assert [each["pp"] for each in found] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [each["dp"] for each in found] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [each["tp"] for each in found] == [each["sp"] for each in found] == [(rank,) for rank in range(4)]
    found = run_on_ranks(answers, 2, {"tp_size": 2})
    assert [(each["sizes"], each["stage"], each["tp"]) for each in found] == [((1, 1, 1, 2, 0), None, (0, 1))] * 2


def last_of(style):
    return HybridParallelPlugin(pp_size=2, pp_style=style).stage_manager.is_last_stage()


@pytest.mark.parametrize(("style", "expected"), [("interleaved", [False, True]), ("zbv", [True, False])])
def test_the_last_stage_is_on_the_rank_that_gets_the_loss(style, expected):
    assert run_on_ranks(last_of, 2, style) == expected


@pytest.mark.parametrize("name", ["dp_size", "coordinates", "stage_manager"])
def test_mesh_attributes_need_the_process_group(name):
    with pytest.raises(ConfigError, match=rf"`plugin\.{name}` needs the process group. Ask for it after `launch"):
        getattr(HybridParallelPlugin(pp_size=2), name)


def test_what_a_script_can_not_see_of_chunks_is_refused():
    position = PipelinePosition(stage=0, num_stages=2, first=0, last=1)
    for ask in (position.is_first_stage, position.is_last_stage):
        with pytest.raises(ConfigError, match="the answer is about all stages of this rank"):
            ask(ignore_chunk=False)
