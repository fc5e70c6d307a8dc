"""Encoders and encoder-decoders for text, of transformers: BERT, ALBERT, T5."""

from model_zoo.fields import batch_of, numbers
from model_zoo.registry import ZooModel, own_loss, weighted_outputs
from model_zoo.transformers_build import from_config

_VOCABULARY, _LENGTH = 64, 8
_TOKENS = numbers(_VOCABULARY, _LENGTH, low=3)
_CLASSES = {"num_labels": 3}
_BERT = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}
_ALBERT = {**_BERT, "embedding_size": 16, "num_hidden_layers": 3}
_T5 = {
    "vocab_size": _VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "use_cache": False,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
_SHIFTS = ("qa_outputs.bias", "bert.encoder.layer.1.output.LayerNorm.bias")
"""Positions are compared with each other: shifting all of them equally has no effect."""
_POSITIONS = {"start_positions": numbers(_LENGTH), "end_positions": numbers(_LENGTH)}


def _heads(family, settings, sentence_label):
    """Return a family's base model and its heads."""
    short = family.lower()

    def one(name, suffix, more=None, *, no_effect=(), **fields):
        return ZooModel(
            name=f"transformers/{short}{name}",
            build=from_config(f"{family}Config", f"{family}{suffix}", **settings, **(more or {})),
            batch=batch_of(**{"input_ids": _TOKENS, **fields}),
            loss=own_loss if fields else weighted_outputs,
            needs=("transformers",),
            no_effect=("*attention*.key.bias", *no_effect),
        )

    return (
        one("", "Model"),
        one("_pretraining", "ForPreTraining", labels=_TOKENS, **{sentence_label: numbers(2)}),
        one("_masked_lm", "ForMaskedLM", labels=_TOKENS),
        one("_classification", "ForSequenceClassification", _CLASSES, labels=numbers(3)),
        one("_token_classification", "ForTokenClassification", _CLASSES, labels=numbers(3, _LENGTH)),
        one("_question_answering", "ForQuestionAnswering", no_effect=_SHIFTS, **_POSITIONS),
        one(
            "_multiple_choice",
            "ForMultipleChoice",
            no_effect=("classifier.bias",),
            input_ids=numbers(_VOCABULARY, 2, _LENGTH, low=3),
            labels=numbers(2),
        ),
    )


def _t5(name, model_class, **fields):
    return ZooModel(
        name=f"transformers/t5{name}",
        build=from_config("T5Config", model_class, **_T5),
        batch=batch_of(input_ids=_TOKENS, **fields),
        loss=own_loss if "labels" in fields else weighted_outputs,
        needs=("transformers",),
    )


MODELS = (
    *_heads("Bert", _BERT, "next_sentence_label"),
    *_heads("Albert", _ALBERT, "sentence_order_label"),
    _t5("", "T5Model", decoder_input_ids=_TOKENS),
    _t5("_generation", "T5ForConditionalGeneration", labels=_TOKENS),
    _t5("_encoder", "T5EncoderModel"),
)
