"""Adapters over a base in 8 or 4 bits, on the kernels that bitsandbytes has for the CPU.

The product refuses this elsewhere than on CUDA, where those kernels are made for; the tests take that one check away.
"""

import pytest
import torch
from isolated_libraries import FOLDER, import_quietly, missing_libraries, use_isolated_libraries

from booster_core import Booster, LazyInitContext
from booster_core.errors import ConfigError
from booster_core.plugin.single import SingleDevicePlugin
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_runtime import quantization
from booster_testing import run_on_ranks
from booster_testing.models import tiny_llama
from booster_zero import LowLevelZeroPlugin

peft = pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-runtime[lora]'")
transformers = pytest.importorskip("transformers", reason="the models are transformers'")

pytestmark = [
    pytest.mark.usefixtures("new_interpreters"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft 0.21
    pytest.mark.skipif(
        bool(missing_libraries(["bitsandbytes"])), reason=f"bitsandbytes not installed, nor in {FOLDER}"
    ),
]

RUNS = {
    "ddp": (TorchDDPPlugin, {}),
    "fsdp": (TorchFSDPPlugin, {}),
    "zero1": (LowLevelZeroPlugin, {"stage": 1}),
    "zero2": (LowLevelZeroPlugin, {"stage": 2, "bucket_bytes": 256}),
    "gemini": (GeminiPlugin, {"min_chunk_bytes": 4096}),
}


def bits(number):
    if number == 4:
        return transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
    return transformers.BitsAndBytesConfig(load_in_8bit=True)


def enabled(booster, number, *, lazy=False):
    """Return a model with adapters whose linear layers are packed."""
    use_isolated_libraries()
    import_quietly(["bitsandbytes"])
    torch.manual_seed(3)
    if lazy:
        with LazyInitContext():
            model = tiny_llama()
    else:
        model = tiny_llama()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantization, "check_quantization", lambda config, device: config)
        return booster.enable_lora(model, lora_config=config, bnb_quantization_config=bits(number))


def train(number, plugin_class, options):
    """Return the losses of a few steps on samples that are the same on every rank."""
    booster = Booster("cpu", plugin=plugin_class(**options))
    model = enabled(booster, number)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    losses, packed = [], []
    for step in range(4):
        tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=tokens, labels=tokens).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        packed.append([p.clone() for p in model.unwrap().parameters() if not p.is_floating_point()])
    assert len(packed[0]) == 2 * 7, "the linear layers of both blocks, and not the head"
    assert all(map(torch.equal, packed[0], packed[-1]))
    return losses


def save(number, plugin_class, options, folder):
    booster = Booster("cpu", plugin=plugin_class(**options))
    model, *_ = booster.boost(enabled(booster, number))
    booster.save_lora_as_pretrained(model, folder)


@pytest.mark.covering(1)  # every plugin with one of the widths; the other pairs are slow
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("number", [4, 8])
def test_adapters_over_a_packed_base_train_as_in_one_process(run, number):
    (expected,) = run_on_ranks(train, 1, number, SingleDevicePlugin, {})
    assert expected[-1] != expected[0]
    for losses in run_on_ranks(train, 2, number, *RUNS[run]):
        assert losses == pytest.approx(expected, rel=1e-6)


def test_adapters_of_a_packed_base_load_in_stock_peft(tmp_path):
    run_on_ranks(save, 2, 4, *RUNS["zero2"], str(tmp_path))
    model = peft.PeftModel.from_pretrained(tiny_llama(), str(tmp_path))
    assert any("lora_A" in name for name, _ in model.named_parameters())


def refuse_lazy():
    with pytest.raises(ConfigError, match="A lazy model has no values to quantise"):
        enabled(Booster("cpu"), 4, lazy=True)


def test_a_lazy_base_is_refused():
    run_on_ranks(refuse_lazy, 1)


def gpt2():
    torch.manual_seed(3)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=2))


def pack_gpt2():
    """Return how far the outputs of packed layers are from those of the layers, and how many were packed."""
    use_isolated_libraries()
    import_quietly(["bitsandbytes"])
    plain, packed = gpt2().eval(), gpt2().eval()
    quantization.quantize_linears(packed, bits(4))
    packed.to("cpu")
    num_packed = sum(type(layer).__name__ == "Linear4bit" for layer in packed.modules())
    tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact, rounded = (model.transformer(tokens).last_hidden_state for model in (plain, packed))
    return num_packed, float((exact - rounded).norm() / exact.norm())


def test_layers_of_gpt2_are_packed():
    ((num_packed, error),) = run_on_ranks(pack_gpt2, 1)
    assert num_packed == 2 * 4
    assert 0 < error < 0.2, "4 bits are within a few per cent of the weights; transposed ones would be far off"


def refuse_experts():
    use_isolated_libraries()
    import_quietly(["bitsandbytes"])
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    config = transformers.Qwen3MoeConfig(**sizes, **experts)
    model = transformers.Qwen3MoeForCausalLM(config)
    with pytest.raises(ConfigError, match=r"can't be quantised: .*'model\.layers\.0\.mlp\.experts'"):
        quantization.quantize_linears(model, bits(4))
    assert not any(type(layer).__name__ == "Linear4bit" for layer in model.modules())
    named = bits(4)
    named.llm_int8_skip_modules = ["experts", "gate"]
    quantization.quantize_linears(model, named)
    assert sum(type(layer).__name__ == "Linear4bit" for layer in model.modules()) == 4


def test_layers_that_cannot_be_packed_are_named():
    run_on_ranks(refuse_experts, 1)
