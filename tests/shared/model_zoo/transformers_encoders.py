"""Encoders and encoder-decoders for text, of transformers: BERT, ALBERT, T5."""

from model_zoo.fields import numbers
from model_zoo.transformers_build import of_transformers

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

    def one(name, suffix, fields, more=None, no_effect=()):
        fields, more = {"input_ids": _TOKENS, **fields}, {**settings, **(more or {})}
        no_effect = ("*attention*.key.bias", *no_effect)
        return of_transformers(
            f"transformers/{family.lower()}{name}", family, suffix, more, fields, no_effect=no_effect
        )

    choices = {"input_ids": numbers(_VOCABULARY, 2, _LENGTH, low=3), "labels": numbers(2)}
    return (
        one("", "Model", {}),
        one("_pretraining", "ForPreTraining", {"labels": _TOKENS, sentence_label: numbers(2)}),
        one("_masked_lm", "ForMaskedLM", {"labels": _TOKENS}),
        one("_classification", "ForSequenceClassification", {"labels": numbers(3)}, _CLASSES),
        one("_token_classification", "ForTokenClassification", {"labels": numbers(3, _LENGTH)}, _CLASSES),
        one("_question_answering", "ForQuestionAnswering", _POSITIONS, no_effect=_SHIFTS),
        one("_multiple_choice", "ForMultipleChoice", choices, no_effect=("classifier.bias",)),
    )


def _t5(name, suffix, **fields):
    return of_transformers(f"transformers/t5{name}", "T5", suffix, _T5, {"input_ids": _TOKENS, **fields})


MODELS = (
    *_heads("Bert", _BERT, "next_sentence_label"),
    *_heads("Albert", _ALBERT, "sentence_order_label"),
    _t5("", "Model", decoder_input_ids=_TOKENS),
    _t5("_generation", "ForConditionalGeneration", labels=_TOKENS),
    _t5("_encoder", "EncoderModel"),
)
