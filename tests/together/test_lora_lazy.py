"""Adapters on models without values: they are recorded with the model, and all equals an eager run, bit for bit."""

import pytest
import torch
from matrix import matrix

from booster_core import Booster
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_runtime import LazyInitContext
from booster_runtime.lazy import is_lazy
from booster_runtime.single import SingleDeviceStrategy
from booster_testing import run_on_ranks
from booster_testing.compare import EXACT, assert_same_tensors
from booster_testing.models import tiny_llama
from booster_testing.training import whole_model
from booster_zero import LowLevelZeroPlugin

peft = pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-runtime[lora]'")
transformers = pytest.importorskip("transformers", reason="the models are transformers'")

pytestmark = pytest.mark.filterwarnings(
    # Where a test calls peft itself: version 0.21 reads an attribute that transformers 5.23 has renamed.
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

RUNS = {
    "single": (SingleDeviceStrategy, {}, 1),
    "ddp": (TorchDDPPlugin, {}, 2),
    "fsdp": (TorchFSDPPlugin, {}, 2),
    "zero1": (LowLevelZeroPlugin, {"stage": 1}, 2),
    "zero2": (LowLevelZeroPlugin, {"stage": 2, "bucket_bytes": 256}, 2),
    "gemini": (GeminiPlugin, {"min_chunk_bytes": 4096}, 2),
}


def config():
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=8, modules_to_save=["lm_head"])


def built(booster, how):
    """Return a model with new adapters: eager, or lazy with adapters put in inside of the context or after it."""
    torch.manual_seed(3)
    if how == "eager":
        return booster.enable_lora(tiny_llama(), lora_config=config())
    with LazyInitContext() as context:
        model = tiny_llama()
        if how == "inside":
            model = booster.enable_lora(model, lora_config=config())
    if how == "after":
        model = booster.enable_lora(model, lora_config=config())
    assert is_lazy(model)
    assert context.run_eagerly == {}
    return model


def loaded(booster, how, base, adapters):
    """Return a model whose base and adapters come from folders."""
    if how == "eager":
        model = transformers.LlamaForCausalLM.from_pretrained(base)
    else:
        with LazyInitContext():
            model = transformers.LlamaForCausalLM.from_pretrained(base)
        assert is_lazy(model)
    return booster.enable_lora(model, pretrained_dir=adapters)


def train(how, plugin_class, options, folders=None):
    booster = Booster("cpu", plugin=plugin_class(**options))
    model = built(booster, how) if folders is None else loaded(booster, how, *folders)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for step in range(3):
        tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=tokens, labels=tokens).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, whole_model(booster, model), torch.get_rng_state()


def assert_lazy_runs_equal(run, hows, folders=None):
    plugin_class, options, world_size = RUNS[run]
    eager = run_on_ranks(train, world_size, "eager", plugin_class, options, folders)
    for how in hows:
        lazy = run_on_ranks(train, world_size, how, plugin_class, options, folders)
        for (losses, tensors, state), (expected_losses, expected, expected_state) in zip(lazy, eager, strict=True):
            assert losses == expected_losses
            assert_same_tensors(tensors, expected, EXACT)
            assert torch.equal(state, expected_state), "random numbers go on as after eager construction"


@matrix(["single"], run=RUNS)
def test_new_adapters_of_a_lazy_model_train_as_those_of_an_eager_one(run):
    assert_lazy_runs_equal(run, ["inside", "after"])
