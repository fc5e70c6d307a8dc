"""Heads of transformers' language models, and variants of these models, for tests of tensor parallelism.

They are not part of the zoo, which has one model of each kind for each plugin.
"""

from model_zoo import transformers_encoders as encoders
from model_zoo import transformers_language as language
from model_zoo import transformers_vision as vision
from model_zoo.fields import normal, numbers
from model_zoo.transformers_build import of_transformers

_LENGTH = 8
_TOKENS = numbers(64, _LENGTH, low=3)
_CLASSES = {"num_labels": 3}
_HEADS = {
    "lm": ("ForCausalLM", {}, {"labels": _TOKENS}),
    "classification": ("ForSequenceClassification", _CLASSES, {"labels": numbers(3)}),
    "token_classification": ("ForTokenClassification", _CLASSES, {"labels": numbers(3, _LENGTH)}),
    "question_answering": ("ForQuestionAnswering", {}, encoders._POSITIONS),
}
_ALL = tuple(_HEADS)
_NO_QUESTIONS = _ALL[:3]
_NO_TOKENS = ("lm", "classification", "question_answering")
_SMALL = language._SIZES
_FAMILIES = {
    "llama": ("Llama", _SMALL, _ALL),
    "mistral": ("Mistral", _SMALL, _ALL),
    "mixtral": ("Mixtral", language._MIXTURE, _ALL),
    "qwen2": ("Qwen2", _SMALL, _ALL),
    "qwen3": ("Qwen3", {**_SMALL, "head_dim": 8}, _ALL),
    "gemma": ("Gemma", {**_SMALL, "head_dim": 8}, _NO_QUESTIONS),
    "phi": ("Phi", {**_SMALL, "num_key_value_heads": 4}, _NO_QUESTIONS),
    "deepseek_v3": ("DeepseekV3", language._LATENT, _NO_QUESTIONS),
    "cohere": ("Cohere", _SMALL, ("lm",)),
    "glm": ("Glm", {**_SMALL, "head_dim": 8}, _NO_QUESTIONS),
    "gptj": ("GPTJ", {**language._GPT, "rotary_dim": 4}, _NO_TOKENS),
    "opt": ("OPT", language._OPT, _NO_TOKENS),
    "bloom": ("Bloom", {**language._BLOOM, "pad_token_id": 0}, _ALL),
    "falcon": ("Falcon", {**language._FALCON, "pad_token_id": 0}, _ALL),
    "falcon_groups": (
        "Falcon",
        {**language._FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
        ("lm",),
    ),
    "falcon_multi_head": (
        "Falcon",
        {**language._FALCON, "multi_query": False, "alibi": True, "parallel_attn": False, "bias": True},
        ("lm",),
    ),
}


def _one(name, family, settings, head):
    suffix, more, fields = _HEADS[head]
    # Shifting all positions or keys equally has no effect, where keys are not rotated by their position.
    no_effect = (
        "*qa_outputs.bias",
        *(("*k_proj.bias",) if family == "OPT" else ()),
        *(("*decoder.final_layer_norm.bias", "*ln_f.bias") if "question" in head else ()),
    )
    fields = {"input_ids": _TOKENS, **fields}
    return of_transformers(f"heads/{name}_{head}", family, suffix, {**settings, **more}, fields, no_effect=no_effect)


_T5 = encoders._T5

MODELS = (
    *(_one(name, family, settings, head) for name, (family, settings, heads) in _FAMILIES.items() for head in heads),
    *(
        of_transformers(
            f"heads/t5_{head}",
            "T5",
            suffix,
            {**_T5, "eos_token_id": 1, **settings},
            {"input_ids": _TOKENS, **fields},
            no_effect=("qa_outputs.bias",),
        )
        for head, (suffix, settings, fields) in _HEADS.items()
        if head in ("token_classification", "question_answering")
    ),
    of_transformers(
        "heads/t5_gated_generation",
        "T5",
        "ForConditionalGeneration",
        {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        {"input_ids": _TOKENS, "labels": _TOKENS},
    ),
    of_transformers(
        "heads/blip2_t5",
        "Blip2",
        "ForConditionalGeneration",
        {**vision._BLIP2, "text_config": {"model_type": "t5", **_T5}},
        {
            "pixel_values": normal(3, 16, 16),
            "input_ids": vision._words_after_an_image,
            "labels": numbers(60, 6, low=3),
        },
        no_effect=("*key.bias",),
    ),
    of_transformers(
        "heads/bert_next_sentence",
        "Bert",
        "ForNextSentencePrediction",
        encoders._BERT,
        {"input_ids": _TOKENS, "labels": numbers(2)},
        no_effect=("*attention*.key.bias",),
    ),
    of_transformers("heads/llama_base", "Llama", "Model", _SMALL, {"input_ids": _TOKENS}),
)
HEADS = {model.name: model for model in MODELS}
