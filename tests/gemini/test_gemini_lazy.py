"""Lazy models go straight into chunks, wherever those are: the same bits as eager ones, and memory for one chunk."""

from __future__ import annotations

import contextlib

import pytest
import torch

from booster_core import Booster
from booster_core.ranks.coordinator import DistCoordinator
from booster_gemini import GeminiPlugin
from booster_runtime.lazy import LazyInitContext, load_pretrained
from booster_testing import run_on_ranks
from booster_testing.memory import peak_memory
from booster_testing.models import tiny_llama
from booster_testing.training import whole_model

PLACES = {
    "here": {},
    "whole": {"partition": "parameter"},
    "disk": {"offload_param_frac": 1.0, "offload_optim_frac": 1.0},
    "auto": {"placement_policy": "auto", "memory_budget_bytes": 120_000},
}


def adapters_on_a_base(lazily):
    peft = pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-runtime[lora]'")
    torch.manual_seed(3)
    with LazyInitContext() if lazily else contextlib.nullcontext():
        model = tiny_llama()
    booster = Booster("cpu", "bf16", GeminiPlugin(min_chunk_bytes=4096))
    torch.manual_seed(4)
    model = booster.enable_lora(model, lora_config=peft.LoraConfig(r=4, target_modules=["q_proj"], lora_alpha=8))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    for step in range(2):
        tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(step))
        booster.backward(model(input_ids=tokens, labels=tokens).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return whole_model(booster, model)


def test_adapters_train_on_a_lazy_base():
    lazy, eager = run_on_ranks(adapters_on_a_base, 2, True)[0], run_on_ranks(adapters_on_a_base, 2, False)[0]
    assert any("lora_A" in name for name in eager)
    assert lazy.keys() == eager.keys()
    assert [key for key in eager if not torch.equal(lazy[key], eager[key])] == []


SETTINGS = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}


def write_folder(folder):
    """Write a model's folder, and return its parameters' bytes."""
    torch.manual_seed(1)
    model = tiny_llama(**SETTINGS)
    model.save_pretrained(folder)
    return sum(parameter.numel() * 4 for parameter in model.parameters())


def boost_from_folder(folder, options):
    """Return the peak while a model goes from a folder into chunks, and what it keeps."""
    with peak_memory() as memory:
        with LazyInitContext():
            model = tiny_llama(**SETTINGS)
        load_pretrained(model, folder)
        plugin = GeminiPlugin(min_chunk_bytes=2**20, **options)
        booster = Booster(plugin=plugin)
        boosted, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    from safetensors.torch import load_file

    expected = load_file(f"{folder}/model.safetensors")
    for shard in booster.state_adapter(boosted).model_shards():
        part = expected[shard.name]
        if shard.flat is not None:
            part = part.flatten()[slice(*shard.flat)]
        assert torch.equal(shard.data, part), shard.name
    DistCoordinator().block_all(name="everybody has read", timeout_seconds=30)
    return memory.peak_bytes


@pytest.mark.parametrize(("place", "most"), [("here", 1.3), ("disk", 0.6)])
def test_a_folder_goes_into_chunks_without_being_held_whole(place, most, tmp_path):
    (total,) = run_on_ranks(write_folder, 1, str(tmp_path / "model"))
    (tmp_path / "chunks").mkdir()
    options = {} if place == "here" else {**PLACES[place], "offload_dir": str(tmp_path / "chunks")}
    run_on_ranks(boost_from_folder, 2, str(tmp_path / "model"), options)  # what is imported on the way
    peaks = run_on_ranks(boost_from_folder, 2, str(tmp_path / "model"), options)
    assert sum(peaks) <= most * total, [peak / 2**20 for peak in peaks]
