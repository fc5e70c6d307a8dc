"""Decoder-only language models of transformers."""

from __future__ import annotations

from typing import Any

from model_zoo.fields import batch_of, numbers
from model_zoo.registry import ZooModel, own_loss
from model_zoo.transformers_build import from_config

_VOCABULARY, _LENGTH = 64, 8
_TOKENS = numbers(_VOCABULARY, _LENGTH, low=3)
_SIZES: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
_GPT: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
_MIXTURE: dict[str, Any] = {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT: dict[str, Any] = {
    **_SIZES,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_OPT: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "use_cache": False,
}
_BLOOM: dict[str, Any] = {"vocab_size": _VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, "use_cache": False}
_FALCON: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "use_cache": False,
}


def _causal(name: str, family: str, settings: dict[str, Any], **more: Any) -> ZooModel:
    return ZooModel(
        name=f"transformers/{name}",
        build=from_config(f"{family}Config", f"{family}ForCausalLM", **settings),
        batch=batch_of(input_ids=_TOKENS, labels=_TOKENS),
        loss=own_loss,
        needs=("transformers",),
        **more,
    )


def _gpt2(
    name: str,
    model_class: str,
    loss: Any = own_loss,
    settings: Any = None,
    no_effect: tuple[str, ...] = (),
    **fields: Any,
) -> ZooModel:
    return ZooModel(
        name=f"transformers/gpt2_{name}",
        build=from_config("GPT2Config", model_class, **_GPT, **(settings or {})),
        batch=batch_of(**{"input_ids": _TOKENS, **fields}),
        loss=loss,
        needs=("transformers",),
        # Choices and positions are compared with each other: shifting all of them equally has no effect.
        no_effect=("multiple_choice_head.summary.bias", "qa_outputs.bias", *no_effect),
    )


def _both_losses(output: Any, _batch: Any) -> Any:
    """Return the sum of the language modeling and multiple choice losses."""
    return output.loss + output.mc_loss


MODELS = (
    _causal("llama", "Llama", _SIZES),
    _causal("llama_tied", "Llama", {**_SIZES, "tie_word_embeddings": True}),
    _causal("mistral", "Mistral", _SIZES),
    _causal("qwen2", "Qwen2", _SIZES),
    _causal("gemma", "Gemma", {**_SIZES, "head_dim": 8}),
    _causal("mixtral", "Mixtral", _MIXTURE),
    _causal(
        "mixtral_balanced",
        "Mixtral",
        {**_MIXTURE, "output_router_logits": True, "router_aux_loss_coef": 0.1},
    ),
    _causal("deepseek_v3", "DeepseekV3", _LATENT),
    _causal("phi", "Phi", {**_SIZES, "num_key_value_heads": 4}),
    _causal("cohere", "Cohere", _SIZES),
    _causal("glm", "Glm", {**_SIZES, "head_dim": 8}),
    _causal("falcon", "Falcon", _FALCON),
    _causal("falcon_alibi", "Falcon", {**_FALCON, "alibi": True, "bias": True, "new_decoder_architecture": False}),
    _causal("gptj", "GPTJ", {**_GPT, "rotary_dim": 4}),
    _causal("opt", "OPT", _OPT, no_effect=("*k_proj.bias",)),
    _causal("bloom", "Bloom", _BLOOM),
    _gpt2("lm", "GPT2LMHeadModel", labels=_TOKENS),
    _gpt2(
        "double_heads",
        "GPT2DoubleHeadsModel",
        _both_losses,
        {"num_labels": 1},
        input_ids=numbers(_VOCABULARY, 2, _LENGTH, low=3),
        labels=numbers(_VOCABULARY, 2, _LENGTH, low=3),
        mc_token_ids=numbers(_LENGTH, 2),
        mc_labels=numbers(2),
    ),
    _gpt2("classification", "GPT2ForSequenceClassification", settings={"num_labels": 3}, labels=numbers(3)),
    _gpt2("token_classification", "GPT2ForTokenClassification", settings={"num_labels": 3}, labels=numbers(3, _LENGTH)),
    _gpt2(
        "question_answering",
        "GPT2ForQuestionAnswering",
        no_effect=("transformer.ln_f.bias",),
        start_positions=numbers(_LENGTH),
        end_positions=numbers(_LENGTH),
    ),
)
