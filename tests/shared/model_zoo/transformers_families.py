"""More families of transformers, among them those that DeepSpeed and Accelerate test: one head each."""

from model_zoo import transformers_audio as audio
from model_zoo import transformers_encoders as encoders
from model_zoo import transformers_language as language
from model_zoo.fields import batch_of, normal, numbers
from model_zoo.registry import ZooModel, own_loss, weighted_outputs
from model_zoo.transformers_build import from_config

_TOKENS = numbers(64, 8, low=3)
_LM = {"input_ids": _TOKENS, "labels": _TOKENS}
_LLAMA = language._SIZES
_GPT = language._GPT
_BERT = {**encoders._BERT, "max_position_embeddings": 40, "pad_token_id": 0}
_EXPERTS = {
    **_LLAMA,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "decoder_sparse_step": 1,
}
_CAUSAL = {
    "gpt_neo": (
        "GPTNeo",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "max_position_embeddings": 32,
            "intermediate_size": 64,
            "use_cache": False,
        },
    ),
    "gpt_neox": ("GPTNeoX", {**_BERT, "use_cache": False}),
    "gpt_bigcode": ("GPTBigCode", _GPT),
    "codegen": ("CodeGen", {**_GPT, "rotary_dim": 4}),
    "phi3": ("Phi3", _LLAMA),
    "gemma2": ("Gemma2", {**_LLAMA, "head_dim": 8}),
    "qwen2_moe": ("Qwen2Moe", _EXPERTS),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "head_dim": 8}),
    "olmoe": ("Olmoe", {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": ("GptOss", {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    "mamba": (
        "Mamba",
        {"vocab_size": 64, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "use_cache": False},
    ),
}
_VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 4,
}
_VISION = {
    "dinov2": ("Dinov2", _VIT),
    "deit": ("DeiT", _VIT),
    "swin": (
        "Swin",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 4,
        },
    ),
    "convnext": (
        "ConvNext",
        {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1], "patch_size": 2, "image_size": 16},
    ),
}
_BART = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "use_cache": False,
}
_DISTILBERT = {
    "vocab_size": 64,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 64,
    "max_position_embeddings": 32,
}
_XLNET = {"vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}
_CLIP = {
    "text_config": {**_BERT, "projection_dim": 16, "bos_token_id": 1, "eos_token_id": 2},
    "vision_config": {**_VIT, "projection_dim": 16},
    "projection_dim": 16,
}


def _embeddings(output, batch):
    """Return a loss of the embeddings and of each text's similarity to its own image: others' couple samples."""
    return weighted_outputs((output.text_embeds, output.image_embeds, output.logits_per_text.diagonal()), batch)


def _one(name, family, suffix, settings, fields, loss=None):
    return ZooModel(
        name=f"transformers/{name}",
        build=from_config(f"{family}Config", f"{family}{suffix}", **settings),
        batch=batch_of(**fields),
        loss=loss or (own_loss if "labels" in fields else weighted_outputs),
        needs=("transformers",),
        no_effect=("*key.bias", "*k_proj.bias", "*k_lin.bias", "*key_proj.bias"),
    )


_IMAGE = {"pixel_values": normal(3, 16, 16)}
_SPEECH = {"input_values": normal(400), "labels": numbers(32, 6, low=3)}

MODELS = (
    *(_one(name, family, "ForCausalLM", settings, _LM) for name, (family, settings) in _CAUSAL.items()),
    *(
        _one(name, family, "ForMaskedLM", _BERT, _LM)
        for name, family in (("roberta", "Roberta"), ("electra", "Electra"), ("deberta_v2", "DebertaV2"))
    ),
    _one("distilbert", "DistilBert", "ForMaskedLM", _DISTILBERT, _LM),
    _one("xlnet", "XLNet", "LMHeadModel", _XLNET, _LM),
    _one("bart", "Bart", "ForConditionalGeneration", _BART, _LM),
    *(
        _one(name, family, "ForImageClassification", {**settings, "num_labels": 3}, {**_IMAGE, "labels": numbers(3)})
        for name, (family, settings) in _VISION.items()
    ),
    _one("clip", "CLIP", "Model", _CLIP, {"input_ids": _TOKENS, **_IMAGE}, _embeddings),
    _one("clip_text", "CLIPText", "Model", {**_BERT, "eos_token_id": 2}, {"input_ids": _TOKENS}),
    _one("clip_vision", "CLIPVision", "Model", _VIT, _IMAGE),
    _one("data2vec_audio", "Data2VecAudio", "ForCTC", audio._WAVES, _SPEECH),
    _one("wavlm", "WavLM", "ForCTC", audio._WAVES, _SPEECH),
)
