"""Audio models of transformers: Whisper, wav2vec 2.0, HuBERT."""

from model_zoo.fields import batch_of, normal, numbers
from model_zoo.registry import ZooModel, own_loss, weighted_outputs
from model_zoo.transformers_build import from_config

_VOCABULARY = 32
_WORDS = numbers(_VOCABULARY, 6, low=3)
_CLASSES = {"num_labels": 8}
"""More than the labels use: with evenly distributed labels, the gradients of biases cancel to rounding errors."""
_WHISPER = {
    "vocab_size": _VOCABULARY,
    "num_mel_bins": 8,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_source_positions": 12,
    "max_target_positions": 12,
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


def _whisper(name, model_class, *, more=None, **fields):
    return ZooModel(
        name=f"transformers/whisper{name}",
        build=from_config("WhisperConfig", model_class, **_WHISPER, **(more or {})),
        batch=batch_of(input_features=normal(8, 24), **fields),
        loss=own_loss if "labels" in fields else weighted_outputs,
        needs=("transformers",),
    )


def _waves(family, name, suffix, *, more=None, **fields):
    return ZooModel(
        name=f"transformers/{family.lower()}{name}",
        build=from_config(f"{family}Config", f"{family}{suffix}", **_WAVES, **(more or {})),
        batch=batch_of(input_values=normal(400), **fields),
        loss=own_loss if fields else weighted_outputs,
        needs=("transformers",),
        no_effect=("*k_proj.bias",),
    )


def _speech(family):
    return (
        _waves(family, "", "Model"),
        _waves(family, "_ctc", "ForCTC", labels=_WORDS),
        _waves(family, "_classification", "ForSequenceClassification", more=_CLASSES, labels=numbers(3)),
    )


MODELS = (
    _whisper("", "WhisperModel", decoder_input_ids=_WORDS),
    _whisper("_generation", "WhisperForConditionalGeneration", labels=_WORDS),
    _whisper("_classification", "WhisperForAudioClassification", more=_CLASSES, labels=numbers(3)),
    *_speech("Wav2Vec2"),
    *_speech("Hubert"),
)
