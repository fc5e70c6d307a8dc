"""More families of transformers, among them those that DeepSpeed and Accelerate test: one head each."""

from model_zoo import transformers_audio as audio
from model_zoo import transformers_encoders as encoders
from model_zoo import transformers_language as language
from model_zoo import transformers_vision as vision
from model_zoo.fields import normal, numbers
from model_zoo.registry import weighted_outputs
from model_zoo.transformers_build import of_transformers

_TOKENS = numbers(64, 8, low=3)
_LM = {"input_ids": _TOKENS, "labels": _TOKENS}
_LLAMA, _GPT, _VIT = language._SIZES, language._GPT, vision._VIT
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
_MASKED = {
    "roberta": ("Roberta", _BERT),
    "electra": ("Electra", _BERT),
    "deberta_v2": ("DebertaV2", _BERT),
    "distilbert": (
        "DistilBert",
        {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 32},
    ),
}
_VISION = {
    "dinov2": ("Dinov2", _VIT),
    "deit": ("DeiT", _VIT),
    "swin": (
        "Swin",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    ),
    "convnext": (
        "ConvNext",
        {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1], "patch_size": 2, "image_size": 16},
    ),
}
_BART = {
    "vocab_size": 64,
    "d_model": 32,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
    "max_position_embeddings": 32,
    **language._SPECIAL,
    "decoder_start_token_id": 2,
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


def _models(suffix, families, fields, *, loss=None, **more):
    no_effect = ("*key.bias", "*k_proj.bias", "*k_lin.bias", "*key_proj.bias")
    return [
        of_transformers(
            f"transformers/{name}", family, suffix, {**settings, **more}, fields, loss=loss, no_effect=no_effect
        )
        for name, (family, settings) in families.items()
    ]


_IMAGE = {"pixel_values": normal(3, 16, 16)}
_SPEECH = {"data2vec_audio": ("Data2VecAudio", audio._WAVES), "wavlm": ("WavLM", audio._WAVES)}

MODELS = (
    *_models("ForCausalLM", _CAUSAL, _LM),
    *_models("ForMaskedLM", _MASKED, _LM),
    *_models("LMHeadModel", {"xlnet": ("XLNet", _XLNET)}, _LM),
    *_models("ForConditionalGeneration", {"bart": ("Bart", _BART)}, _LM),
    *_models("ForImageClassification", _VISION, {**_IMAGE, "labels": numbers(3)}, num_labels=3),
    *_models("Model", {"clip": ("CLIP", _CLIP)}, {"input_ids": _TOKENS, **_IMAGE}, loss=_embeddings),
    *_models("Model", {"clip_text": ("CLIPText", {**_BERT, "eos_token_id": 2})}, {"input_ids": _TOKENS}),
    *_models("Model", {"clip_vision": ("CLIPVision", _VIT)}, _IMAGE),
    *_models("ForCTC", _SPEECH, {"input_values": normal(400), "labels": numbers(32, 6, low=3)}),
)
