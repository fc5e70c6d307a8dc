"""Adapters of other kinds than LoRA, put around a model by peft: gradients, training and files under every strategy."""

from __future__ import annotations

import pytest
import torch
from matrix import matrix

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_core.ranks.coordinator import DistCoordinator
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_runtime import full_gradient
from booster_runtime.single import SingleDeviceStrategy
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import EXACT, assert_same_tensors, tolerance_for
from booster_testing.models import tiny_llama
from booster_zero import LowLevelZeroPlugin

peft = pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-runtime[lora]'")
transformers = pytest.importorskip("transformers", reason="the models are transformers'")

pytestmark = pytest.mark.filterwarnings(
    # peft 0.21 reads an attribute that transformers 5.23 has renamed.
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

RUNS = {
    "single": (SingleDeviceStrategy, {}, 1),
    "ddp": (TorchDDPPlugin, {}, 2),
    "fsdp": (TorchFSDPPlugin, {"unit_min_numel": 32}, 2),
    "zero2": (LowLevelZeroPlugin, {"stage": 2, "bucket_bytes": 256}, 2),
    "gemini": (GeminiPlugin, {"min_chunk_bytes": 4096}, 2),
}
TARGETS = ["q_proj", "v_proj"]
CONFIGS = {
    "ia3": lambda: peft.IA3Config(target_modules=[*TARGETS, "down_proj"], feedforward_modules=["down_proj"]),
    "loha": lambda: peft.LoHaConfig(r=2, target_modules=TARGETS),
    "lokr": lambda: peft.LoKrConfig(r=2, target_modules=TARGETS),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=4, target_modules=TARGETS),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"]),
    "fourierft": lambda: peft.FourierFTConfig(n_frequency=20, target_modules=TARGETS),
}
SAMPLES = 4


def make_model(kind):
    torch.manual_seed(3)
    model = peft.get_peft_model(tiny_llama(), CONFIGS[kind]())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def tokens_of(step):
    return torch.randint(64, (SAMPLES, 8), generator=torch.Generator().manual_seed(step))


def loss_of(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss


def train_and_save(kind, plugin_class, options, folder):
    """Return gradients and new values of the adapter after one step."""
    booster = Booster("cpu", plugin=plugin_class(**options))
    model = make_model(kind)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    coordinator = DistCoordinator()
    booster.backward(loss_of(model, tokens_of(0)[coordinator.rank :: coordinator.world_size]), optimizer)
    names = [name.removeprefix("base_model.model.") for name in trained]
    gradients = {name: full_gradient(booster, model, name) for name in names}
    optimizer.step()
    optimizer.zero_grad()
    booster.save_lora_as_pretrained(model, folder)
    with torch.no_grad():
        logits = model(input_ids=tokens_of(9)).logits
    return gradients, logits


@matrix(["ia3-single"], kind=CONFIGS, run=RUNS)
def test_gradients_equal_one_process_and_files_load_in_peft(kind, run, tmp_path):
    plain = make_model(kind)
    loss_of(plain, tokens_of(0)).backward()
    expected = {
        name.removeprefix("base_model.model."): parameter.grad
        for name, parameter in plain.named_parameters()
        if parameter.requires_grad
    }
    assert expected
    plugin_class, options, world_size = RUNS[run]
    results = run_on_ranks(train_and_save, world_size, kind, plugin_class, options, str(tmp_path))
    for gradients, _ in results:
        assert_same_tensors(gradients, expected, tolerance_for(torch.float32))
    torch.manual_seed(3)
    loaded = peft.PeftModel.from_pretrained(tiny_llama(), str(tmp_path))
    with torch.no_grad():
        logits = loaded(input_ids=tokens_of(9)).logits
    assert_same_tensors({"logits": logits}, {"logits": results[0][1]}, EXACT)


def boost_refused(kind, plugin):
    model = make_model(kind)
    Booster("cpu", plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_plugin_under_which_a_kind_was_not_tested_is_refused():
    match = "type IA3 have not been tested under plugin 'hybrid'"
    expect_on_ranks(ConfigError, match, boost_refused, 2, "ia3", "hybrid")


def test_an_optimizer_that_was_made_before_the_adapters_is_refused():
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    adapted = peft.get_peft_model(model, CONFIGS["ia3"]())
    with pytest.raises(ConfigError, match=r"lacks 6 parameters of adapters, such as '.*ia3_l"):
        Booster().boost(adapted, optimizer)


def test_frozen_adapters_are_refused():
    model = peft.get_peft_model(tiny_llama(), CONFIGS["ia3"]())
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="No adapter of the model is trained"):
        Booster().boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_kinds_that_were_not_tried_are_refused_for_that_reason():
    model = peft.get_peft_model(tiny_llama(), peft.HRAConfig(r=2, target_modules=TARGETS))
    with pytest.raises(ConfigError, match=r"type HRA have not been tested.*IA3, .*LORA"):
        Booster().boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
