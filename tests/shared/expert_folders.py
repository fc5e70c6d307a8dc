"""Small mixtures of experts of transformers, and conversions of its folders, for tests of what is written and read."""

import contextlib

import torch
import transformers
from safetensors.torch import load_file

SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
    "n_routed_experts": 12,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
EXPERTS = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
"""Twelve, so that 10 comes after 9 and not after 1."""


def mixtral():
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=12, **SMALL))


def qwen2_moe():
    config = transformers.Qwen2MoeConfig(shared_expert_intermediate_size=12, **EXPERTS, **SMALL)
    return transformers.Qwen2MoeForCausalLM(config)


def qwen3_moe():
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(head_dim=4, **EXPERTS, **SMALL))


def deepseek_v2():
    return transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**{**SMALL, **LATENT}))


def deepseek_v3():
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**{**SMALL, **LATENT}))


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


FACTORIES = [mixtral, qwen2_moe, qwen3_moe, deepseek_v2, deepseek_v3]


def build(factory, seed=0):
    torch.manual_seed(seed)
    return factory().eval()


def tensors_in(folder):
    return {key: tensor for path in folder.glob("*.safetensors") for key, tensor in load_file(path).items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


@contextlib.contextmanager
def transposed_files():
    """Let the files of Llamas hold two of the matrices transposed, under names of their own."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    entries = [
        WeightConverter(f"mlp.w{name}.weight", f"mlp.{name}_proj.weight", [Transpose(0, 1)]) for name in ("up", "down")
    ]
    conversion_mapping.register_checkpoint_conversion_mapping("llama", entries, overwrite=True)
    try:
        yield
    finally:
        conversion_mapping._checkpoint_conversion_mapping_cache = None
        getattr(conversion_mapping, "USER_REGISTERED_MAPPINGS", set()).discard("llama")  # 5.12 keeps no list of them
