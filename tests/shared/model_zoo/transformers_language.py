"""Decoder-only language models of transformers."""

from model_zoo.fields import numbers
from model_zoo.transformers_build import of_transformers

_VOCABULARY, _LENGTH = 64, 8
_TOKENS = numbers(_VOCABULARY, _LENGTH, low=3)
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
_SIZES = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    **_SPECIAL,
}
_GPT = {"vocab_size": _VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, **_SPECIAL}
_MIXTURE = {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
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
_BLOOM = {"vocab_size": _VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, "use_cache": False}
_FALCON = {key: _SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
_FALCON["use_cache"] = False
_OPT = {**_FALCON, "word_embed_proj_dim": 32, "ffn_dim": 64, "max_position_embeddings": 32, "pad_token_id": 0}


def _causal(name, family, settings, **more):
    fields = {"input_ids": _TOKENS, "labels": _TOKENS}
    return of_transformers(f"transformers/{name}", family, "ForCausalLM", settings, fields, **more)


def _gpt2(name, suffix, fields, settings=None, no_effect=(), **more):
    # Choices and positions are compared with each other: shifting all of them equally has no effect.
    shifts = ("multiple_choice_head.summary.bias", "qa_outputs.bias", *no_effect)
    fields, settings = {"input_ids": _TOKENS, **fields}, {**_GPT, **(settings or {})}
    return of_transformers(f"transformers/gpt2_{name}", "GPT2", suffix, settings, fields, no_effect=shifts, **more)


def _both_losses(output, _batch):
    """Return the sum of the language modeling and multiple choice losses."""
    return output.loss + output.mc_loss


_CHOICES = numbers(_VOCABULARY, 2, _LENGTH, low=3)
_CLASSES = {"num_labels": 3}
MODELS = (
    _causal("llama", "Llama", _SIZES),
    _causal("llama_tied", "Llama", {**_SIZES, "tie_word_embeddings": True}),
    _causal("mistral", "Mistral", _SIZES),
    _causal("qwen2", "Qwen2", _SIZES),
    _causal("gemma", "Gemma", {**_SIZES, "head_dim": 8}),
    _causal("mixtral", "Mixtral", _MIXTURE),
    _causal("mixtral_balanced", "Mixtral", {**_MIXTURE, "output_router_logits": True, "router_aux_loss_coef": 0.1}),
    _causal("deepseek_v3", "DeepseekV3", _LATENT),
    _causal("phi", "Phi", {**_SIZES, "num_key_value_heads": 4}),
    _causal("cohere", "Cohere", _SIZES),
    _causal("glm", "Glm", {**_SIZES, "head_dim": 8}),
    _causal("falcon", "Falcon", _FALCON),
    _causal("falcon_alibi", "Falcon", {**_FALCON, "alibi": True, "bias": True, "new_decoder_architecture": False}),
    _causal("gptj", "GPTJ", {**_GPT, "rotary_dim": 4}),
    _causal("opt", "OPT", _OPT, no_effect=("*k_proj.bias",)),
    _causal("bloom", "Bloom", _BLOOM),
    _gpt2("lm", "LMHeadModel", {"labels": _TOKENS}),
    _gpt2(
        "double_heads",
        "DoubleHeadsModel",
        {"input_ids": _CHOICES, "labels": _CHOICES, "mc_token_ids": numbers(_LENGTH, 2), "mc_labels": numbers(2)},
        {"num_labels": 1},
        loss=_both_losses,
    ),
    _gpt2("classification", "ForSequenceClassification", {"labels": numbers(3)}, _CLASSES),
    _gpt2("token_classification", "ForTokenClassification", {"labels": numbers(3, _LENGTH)}, _CLASSES),
    _gpt2(
        "question_answering",
        "ForQuestionAnswering",
        {"start_positions": numbers(_LENGTH), "end_positions": numbers(_LENGTH)},
        no_effect=("transformer.ln_f.bias",),
    ),
)
