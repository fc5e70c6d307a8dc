"""A base in 8 or 4 bits in one process: which layers are packed, and what is refused."""

import pytest
import torch
from adapted_models import bits
from isolated_libraries import FOLDER, import_quietly, missing_libraries, use_isolated_libraries
from ranked import on_ranks

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_runtime import LazyInitContext, lora
from booster_testing.models import tiny_llama

peft = pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-runtime[lora]'")
transformers = pytest.importorskip("transformers", reason="the models are transformers'")

pytestmark = [
    pytest.mark.usefixtures("ranks_with_isolated_libraries"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft 0.21
    pytest.mark.skipif(
        bool(missing_libraries(["bitsandbytes"])), reason=f"bitsandbytes not installed, nor in {FOLDER}"
    ),
]


@on_ranks(1)
def test_a_lazy_base_is_not_packed():
    use_isolated_libraries()
    import_quietly(["bitsandbytes"])
    with LazyInitContext():
        lazy = tiny_llama()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    with pytest.raises(ConfigError, match="A lazy model has no values to quantise"):
        Booster("cpu").enable_lora(lazy, lora_config=config, bnb_quantization_config=bits(4))


@on_ranks(1)
def test_settings_are_four_bits_by_default():
    use_isolated_libraries()
    import_quietly(["bitsandbytes"])
    device = torch.device("cuda")
    chosen = lora.check_quantization(None, device)
    assert (chosen.load_in_4bit, chosen.bnb_4bit_quant_type) == (True, "nf4")
    given = bits(8)
    assert lora.check_quantization(given, device) is given
    with pytest.raises(TypeError, match=r"must be a transformers.BitsAndBytesConfig; got `dict`"):
        lora.check_quantization({"load_in_8bit": True}, device)


def gpt2():
    torch.manual_seed(3)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=2))


@on_ranks(1)
def test_layers_of_gpt2_are_packed():
    use_isolated_libraries()
    import_quietly(["bitsandbytes"])
    plain, packed = gpt2().eval(), gpt2().eval()
    lora.quantize_linears(packed, bits(4))
    packed.to("cpu")
    num_packed = sum(type(layer).__name__ == "Linear4bit" for layer in packed.modules())
    tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact, rounded = (model.transformer(tokens).last_hidden_state for model in (plain, packed))
    error = float((exact - rounded).norm() / exact.norm())
    assert num_packed == 2 * 4
    assert 0 < error < 0.2, "4 bits are within a few per cent of the weights; transposed ones would be far off"


@on_ranks(1)
def test_layers_that_cannot_be_packed_are_named():
    use_isolated_libraries()
    import_quietly(["bitsandbytes"])
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    config = transformers.Qwen3MoeConfig(**sizes, **experts)
    model = transformers.Qwen3MoeForCausalLM(config)
    with pytest.raises(ConfigError, match=r"can't be quantised: .*'model\.layers\.0\.mlp\.experts'"):
        lora.quantize_linears(model, bits(4))
    assert not any(type(layer).__name__ == "Linear4bit" for layer in model.modules())
    named = bits(4)
    named.llm_int8_skip_modules = ["experts", "gate"]
    lora.quantize_linears(model, named)
    assert sum(type(layer).__name__ == "Linear4bit" for layer in model.modules()) == 4
