"""How often `boost` meets in the store that rank 0 serves for all ranks: once, under each plugin."""

import contextlib
from unittest import mock

import pytest
import torch
from cases import Setting
from plugin_runs import runs
from ranked import on_ranks
from torch.utils.data import DataLoader

from booster_core.ranks.meeting import Meeting
from booster_hybrid import HybridParallelPlugin
from booster_runtime import LazyInitContext
from booster_testing.models import tiny_llama

SETTINGS = {
    **runs("ddp", "zero2", "gemini", "fsdp", "hybrid-tp", "hybrid-pp"),
    "split sequences": Setting(HybridParallelPlugin, {"sp_size": 2, "sequence_parallelism_mode": "all_to_all"}),
}


@pytest.mark.parametrize("is_lazy", [False, True], ids=["eager", "lazy"])
@on_ranks(2)
def test_boost_meets_once(is_lazy):
    torch.manual_seed(0)
    ids = torch.arange(8)
    for name, setting in SETTINGS.items():
        with LazyInitContext() if is_lazy else contextlib.nullcontext():
            model = tiny_llama()
        loader = DataLoader([{"input_ids": ids, "labels": ids}] * 4, batch_size=2, shuffle=True)
        with mock.patch.object(Meeting, "meet", autospec=True, side_effect=Meeting.meet) as meet:
            setting.make_booster().boost(model, torch.optim.AdamW(model.parameters()), None, loader)
        assert [call.args[1] for call in meet.call_args_list] == ["boost"], name
