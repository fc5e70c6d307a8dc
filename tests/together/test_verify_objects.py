"""`verify_objects` under every strategy: it leaves no trace on the training that follows, and refuses lazy models."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from expert_models import SAMPLES, batch_of
from expert_models import make as make_experts
from noisy_training import Net, leaves_no_trace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_runtime.lazy import LazyInitContext
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.models import tiny_llama
from booster_tools import verify_objects
from booster_zero import LowLevelZeroPlugin

PLUGINS = {
    "ddp": (TorchDDPPlugin, {}),
    "fsdp": (TorchFSDPPlugin, {}),
    "zero2": (LowLevelZeroPlugin, {"stage": 2}),
    "zero-bf16": (LowLevelZeroPlugin, {"precision": "bf16"}),
    "gemini": (GeminiPlugin, {"min_chunk_bytes": 8192}),
    "hybrid-tp": (HybridParallelPlugin, {"tp_size": 2}),
    "hybrid-pp": (HybridParallelPlugin, {"pp_size": 2, "num_microbatches": 2}),
}


def plugin_named(name):
    return PLUGINS[name][0](**PLUGINS[name][1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugin", "kind"),
    [
        ("ddp", "shuffled"),
        ("fsdp", "shuffled"),
        ("zero2", "shuffled"),
        ("gemini", "sampler"),
    ],
)
def test_the_training_that_follows_is_the_same_bit_for_bit(plugin, kind):
    run_on_ranks(leaves_no_trace, 2, partial(plugin_named, plugin), kind)


def trained_llama(plugin, verify):
    tokens = torch.randint(16, (8, 6), generator=torch.Generator().manual_seed(0))
    loader = DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=4, shuffle=True)
    torch.manual_seed(0)
    model = tiny_llama(attention_dropout=0.2)
    booster = Booster(plugin=plugin_named(plugin))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if verify:
        verify_objects(booster, model, optimizer, dataloader=loader)
    model, optimizer, _, loader, _ = booster.boost(model, optimizer, dataloader=loader)
    losses = []
    for batch in loader:
        if plugin == "hybrid-pp":
            losses.append(booster.execute_pipeline(iter([batch]), model, lambda out, _: out.loss, optimizer)["loss"])
        else:
            losses.append(model(**batch).loss)
            booster.backward(losses[-1], optimizer)
        optimizer.step()
        optimizer.zero_grad()
    adapter = booster.state_adapter(model)
    tensors = [shard.data.clone() for shard in (*adapter.model_shards(), *adapter.optimizer_shards())]
    return [None if loss is None else float(loss.detach()) for loss in losses], tensors, torch.get_rng_state()


def leaves_llama_alone(plugin):
    plain, verified = trained_llama(plugin, verify=False), trained_llama(plugin, verify=True)
    assert plain[0] == verified[0]
    assert all(torch.equal(one, other) for one, other in zip(plain[1], verified[1], strict=True))
    assert torch.equal(plain[2], verified[2])


@pytest.mark.parametrize("plugin", ["hybrid-tp", pytest.param("hybrid-pp", marks=pytest.mark.slow)])
def test_the_training_of_a_model_in_parts_is_the_same_bit_for_bit(plugin):
    run_on_ranks(leaves_llama_alone, 2, plugin)


def reported(plugin, precision):
    tokens = torch.randint(16, (8, 6), generator=torch.Generator().manual_seed(0))
    loader = DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=4)
    torch.manual_seed(0)
    model = tiny_llama()
    booster = Booster(plugin=plugin_named(plugin), mixed_precision=precision)
    return str(verify_objects(booster, model, torch.optim.AdamW(model.parameters(), lr=1e-2), dataloader=loader))


@pytest.mark.parametrize(
    ("plugin", "precision"),
    [
        ("ddp", None),
        pytest.param("zero2", "bf16", marks=pytest.mark.slow),
        ("zero-bf16", None),
        pytest.param("gemini", None, marks=pytest.mark.slow),
        pytest.param("fsdp", None, marks=pytest.mark.slow),
        pytest.param("hybrid-tp", None, marks=pytest.mark.slow),
        pytest.param("hybrid-pp", None, marks=pytest.mark.slow),
    ],
)
def test_it_says_how_long_it_took(plugin, precision):
    for text in run_on_ranks(reported, 2, plugin, precision):
        assert text.startswith("Verified in ")
        assert "on 2 rank(s) trains as one process does" in text


def reported_of_experts():
    model = make_experts("qwen3_moe", dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = [{key: value[0] for key, value in batch_of(0, number, 1).items()} for number in range(8)]
    loader = DataLoader(rows, batch_size=SAMPLES)
    booster = Booster("cpu", plugin=HybridParallelPlugin(ep_size=2))
    return str(verify_objects(booster, model, optimizer, dataloader=loader))


def test_spread_experts_train_as_one_process_does():
    for text in run_on_ranks(reported_of_experts, 2):
        assert "on 2 rank(s) trains as one process does" in text


def refuse_lazy():
    with LazyInitContext():
        model = Net()
    loader = DataLoader(TensorDataset(torch.randn(8, 8), torch.arange(8) % 3), batch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    verify_objects(Booster(plugin="zero"), model, optimizer, nn.CrossEntropyLoss(), loader)


def test_a_lazy_model_is_refused():
    expect_on_ranks(ConfigError, "this model is lazy", refuse_lazy, 2)
