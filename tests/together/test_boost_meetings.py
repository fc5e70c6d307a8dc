"""How often `boost` meets in the store that rank 0 serves for all ranks: once, under each plugin."""

import contextlib
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from booster_core import Booster
from booster_core.plugin import load
from booster_core.ranks.meeting import Meeting
from booster_runtime import LazyInitContext
from booster_testing import run_on_ranks

SETTINGS = {
    "ddp": ("ddp", {}),
    "zero": ("zero", {"stage": 2}),
    "gemini": ("gemini", {}),
    "fsdp": ("fsdp", {}),
    "tensor parallel": ("hybrid", {"tp_size": 2}),
    "pipeline": ("hybrid", {"pp_size": 2, "num_microbatches": 2}),
    "split sequences": (
        "hybrid",
        {"sp_size": 2, "sequence_parallelism_mode": "all_to_all"},
    ),
}


def boost(case, *, is_lazy):
    name, options = SETTINGS[case]
    plugin = load(name)(**options)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    with LazyInitContext() if is_lazy else contextlib.nullcontext():
        model = LlamaForCausalLM(LlamaConfig(vocab_size=8, num_key_value_heads=2, **sizes))
    ids = torch.arange(8)
    loader = DataLoader([{"input_ids": ids, "labels": ids}] * 4, batch_size=2, shuffle=True)
    calls = []
    meet = Meeting.meet

    def counted(self, name, **options):
        calls.append(name)
        return meet(self, name, **options)

    with mock.patch.object(Meeting, "meet", counted):
        Booster("cpu", plugin=plugin).boost(model, torch.optim.AdamW(model.parameters()), None, loader)
    return calls


def boost_all(is_lazy):
    torch.manual_seed(0)
    return {case: boost(case, is_lazy=is_lazy) for case in SETTINGS}


@pytest.mark.parametrize("is_lazy", [False, True], ids=["eager", "lazy"])
def test_boost_meets_once(is_lazy):
    for of_rank in run_on_ranks(boost_all, 2, is_lazy):
        assert of_rank == {case: ["boost"] for case in SETTINGS}
