"""Vision models of transformers: ViT, SAM, BLIP-2."""

import torch

from model_zoo.fields import batch_of, normal, numbers, same
from model_zoo.registry import ZooModel, own_loss, weighted_outputs
from model_zoo.transformers_build import from_config

_IMAGE = normal(3, 16, 16)
_SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_VIT = {**_SMALL, "image_size": 16, "patch_size": 4}
_SAM = {
    "initializer_range": 0.2,
    "vision_config": {
        "hidden_size": 32,
        "output_channels": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
        "window_size": 2,
        "global_attn_indexes": [1],
        "num_pos_feats": 8,
        "mlp_dim": 64,
        "initializer_range": 0.2,
    },
    "prompt_encoder_config": {"hidden_size": 16, "image_size": 32, "patch_size": 8, "mask_input_channels": 8},
    "mask_decoder_config": {
        "hidden_size": 16,
        "mlp_dim": 32,
        "num_attention_heads": 4,
        "iou_head_hidden_dim": 16,
    },
}
_IMAGE_TOKEN, _QUERIES, _WORDS = 63, 4, 6
_BLIP2 = {
    "vision_config": {**_VIT, "initializer_range": 0.02},
    "qformer_config": {**_SMALL, "vocab_size": 64, "encoder_hidden_size": 32, "max_position_embeddings": 32},
    "text_config": {
        "model_type": "opt",
        "vocab_size": 64,
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "use_cache": False,
    },
    "num_query_tokens": _QUERIES,
    "image_token_index": _IMAGE_TOKEN,
}


def _words_after_an_image(generator, samples):
    image = torch.full((samples, _QUERIES), _IMAGE_TOKEN)
    return torch.cat([image, torch.randint(3, _IMAGE_TOKEN, (samples, _WORDS), generator=generator)], dim=1)


def _vit(name, model_class, *, more=None, **fields):
    return ZooModel(
        name=f"transformers/vit{name}",
        build=from_config("ViTConfig", model_class, **_VIT, **(more or {})),
        batch=batch_of(pixel_values=_IMAGE, **fields),
        loss=own_loss if fields else weighted_outputs,
        needs=("transformers",),
        no_effect=("*attention.key.bias", "*attention.k_proj.bias"),
    )


MODELS = (
    _vit("", "ViTModel"),
    _vit("_classification", "ViTForImageClassification", more={"num_labels": 3}, labels=numbers(3)),
    _vit(
        "_masked",
        "ViTForMaskedImageModeling",
        more={"encoder_stride": 4},
        bool_masked_pos=same([True, False] * 8),
    ),
    ZooModel(
        name="transformers/sam",
        build=from_config("SamConfig", "SamModel", **_SAM),
        batch=batch_of(pixel_values=normal(3, 32, 32), input_points=normal(1, 2, 2), input_labels=same([[1, 0]])),
        needs=("transformers",),
        no_effect=("*k_proj.bias",),
    ),
    ZooModel(
        name="transformers/blip2",
        build=from_config("Blip2Config", "Blip2ForConditionalGeneration", **_BLIP2),
        batch=batch_of(
            pixel_values=_IMAGE, input_ids=_words_after_an_image, labels=numbers(_IMAGE_TOKEN, _QUERIES + _WORDS, low=3)
        ),
        loss=own_loss,
        needs=("transformers",),
        no_effect=("*key.bias", "*k_proj.bias"),
    ),
)
