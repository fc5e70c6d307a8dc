"""Audio models of transformers: Whisper, wav2vec 2.0, HuBERT."""

from model_zoo.fields import normal, numbers
from model_zoo.transformers_build import of_transformers

_VOCABULARY = 32
_WORDS = numbers(_VOCABULARY, 6, low=3)
_CLASSES = {"num_labels": 8}
"""More than the labels use: with evenly distributed labels, the gradients of biases cancel to rounding errors."""
_WHISPER = {
    "vocab_size": _VOCABULARY,
    "num_mel_bins": 8,
    "d_model": 32,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 12),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "apply_spec_augment": False,
    "use_cache": False,
}
_WAVES = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (16, 16),
    "conv_kernel": (8, 4),
    "conv_stride": (4, 2),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "apply_spec_augment": False,
    "ctc_loss_reduction": "mean",
    "classifier_proj_size": 16,
    "pad_token_id": 0,
}


def _whisper(name, suffix, more=None, **fields):
    fields, settings = {"input_features": normal(8, 24), **fields}, {**_WHISPER, **(more or {})}
    return of_transformers(f"transformers/whisper{name}", "Whisper", suffix, settings, fields)


def _speech(family):
    return tuple(
        of_transformers(
            f"transformers/{family.lower()}{name}",
            family,
            suffix,
            {**_WAVES, **more},
            {"input_values": normal(400), **fields},
            no_effect=("*k_proj.bias",),
        )
        for name, suffix, more, fields in (
            ("", "Model", {}, {}),
            ("_ctc", "ForCTC", {}, {"labels": _WORDS}),
            ("_classification", "ForSequenceClassification", _CLASSES, {"labels": numbers(3)}),
        )
    )


MODELS = (
    _whisper("", "Model", decoder_input_ids=_WORDS),
    _whisper("_generation", "ForConditionalGeneration", labels=_WORDS),
    _whisper("_classification", "ForAudioClassification", _CLASSES, labels=numbers(3)),
    *_speech("Wav2Vec2"),
    *_speech("Hubert"),
)
