"""Adapters on the parameters of fused experts: peft puts two wrappers around them, and each tensor has its own name."""

import pytest
import torch
from adapted_models import perturbed
from matrix import matrix
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_core.ranks.coordinator import DistCoordinator
from booster_core.state.names import NamedTensors
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_runtime import full_gradient
from booster_runtime.single import SingleDeviceStrategy
from booster_testing import run_on_ranks
from booster_testing.compare import EXACT, assert_same_tensors, tolerance_for
from booster_testing.training import whole_model
from booster_zero import LowLevelZeroPlugin

peft = pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-runtime[lora]'")
transformers = pytest.importorskip("transformers", reason="the models are transformers'")

pytestmark = pytest.mark.filterwarnings(
    # peft 0.21 reads an attribute that transformers 5.23 has renamed.
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

RUNS = {
    "single": (SingleDeviceStrategy, {}, 1),
    "ddp": (TorchDDPPlugin, {"find_unused_parameters": True}, 2),
    "fsdp": (TorchFSDPPlugin, {}, 2),
    "zero2": (LowLevelZeroPlugin, {"stage": 2}, 2),
    "gemini": (GeminiPlugin, {"min_chunk_bytes": 4096}, 2),
    "ep": (HybridParallelPlugin, {"ep_size": 2}, 2),
    "tp": (HybridParallelPlugin, {"tp_size": 2}, 2),
    "ep-tp-zero1": (HybridParallelPlugin, {"ep_size": 2, "tp_size": 2, "zero_stage": 1}, 4),
}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "use_cache": False,
}
NUM_ADAPTERS = 12
"""Two layers, three adapted parameters in each, two tensors for each of them."""


def make_model(kind):
    torch.manual_seed(3)
    if kind == "mixtral":
        config = transformers.MixtralConfig(**SIZES, intermediate_size=24, num_local_experts=4)
        return transformers.MixtralForCausalLM(config)
    config = transformers.Qwen3MoeConfig(**SIZES, intermediate_size=24, moe_intermediate_size=24, num_experts=4)
    return transformers.Qwen3MoeForCausalLM(config)


def make_config():
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return peft.LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj"], target_parameters=experts)


def tokens_of(step):
    return torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(step))


def loss_of(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss


def train_and_save(kind, plugin_class, options, folder):
    """Return the gradients of a step with the same samples on every rank, the logits after it, and the model."""
    booster = Booster("cpu", plugin=plugin_class(**options))
    model = perturbed(booster.enable_lora(make_model(kind), lora_config=make_config()))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.backward(loss_of(model, tokens_of(0)), optimizer)
    held = DistCoordinator().all_gather_object([shard.name for shard in booster.state_adapter(model).model_shards()])
    names = sorted({name for of_rank in held for name in of_rank if "lora_" in name})
    gradients = {name: full_gradient(booster, model, name) for name in names}
    optimizer.step()
    optimizer.zero_grad()
    booster.save_lora_as_pretrained(model, f"{folder}/lora")
    booster.save_model(model, f"{folder}/model", shard=True)
    with torch.no_grad():
        logits = model(input_ids=tokens_of(9)).logits
    return gradients, logits, whole_model(booster, model)


@matrix(
    ["mixtral-single", "mixtral-fsdp", "qwen3-moe-gemini", "mixtral-ep", "mixtral-tp", "qwen3-moe-ep-tp-zero1"],
    kind=["mixtral", "qwen3-moe"],
    run=RUNS,
)
def test_adapters_of_fused_experts_train_and_are_all_saved(run, kind, tmp_path):
    plain = perturbed(peft.get_peft_model(make_model(kind), make_config()))
    loss_of(plain, tokens_of(0)).backward()
    expected = {
        name.removeprefix("base_model.model."): parameter.grad
        for name, parameter in plain.named_parameters()
        if parameter.requires_grad
    }
    assert len(expected) == NUM_ADAPTERS
    plugin_class, options, world_size = RUNS[run]
    results = run_on_ranks(train_and_save, world_size, kind, plugin_class, options, str(tmp_path))
    for gradients, _, _ in results:
        assert_same_tensors(gradients, expected, tolerance_for(torch.float32))

    stored = peft.utils.save_and_load.load_peft_weights(str(tmp_path / "lora"), device="cpu")
    assert len(stored) == NUM_ADAPTERS
    loaded = peft.PeftModel.from_pretrained(make_model(kind), str(tmp_path / "lora"))
    with torch.no_grad():
        logits = loaded(input_ids=tokens_of(9)).logits
    adapters = {
        name.removeprefix("base_model.model."): value for name, value in loaded.named_parameters() if "lora_" in name
    }
    assert_same_tensors(adapters, {name: results[0][2][name] for name in expected}, EXACT)
    # This process may compute with other numbers of threads than ranks, in whose order sums are taken.
    assert_same_tensors({"logits": logits}, {"logits": results[0][1]}, tolerance_for(torch.float32))

    booster = Booster("cpu")
    again, *_ = booster.boost(booster.enable_lora(make_model(kind), lora_config=make_config()))
    booster.load_model(again, tmp_path / "model")
    assert_same_tensors(whole_model(booster, again), results[0][2], EXACT)


class Wrapped(nn.Module):
    """Has a module under a name that is left out of names, and a tensor of the same name."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self._orig_mod = inner


def test_two_tensors_of_one_name_are_refused():
    model = nn.Sequential(Wrapped(nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match=r"name '0\.weight' in files: '0\.weight' and '0\._orig_mod\.weight'"):
        NamedTensors.of(model)
    with pytest.raises(ConfigError, match=r"name '0\.weight'"):
        Booster("cpu").boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
