"""Vision models of transformers: ViT, SAM, BLIP-2."""

import torch

from model_zoo import transformers_language as language
from model_zoo.fields import normal, numbers, same
from model_zoo.registry import own_loss
from model_zoo.transformers_build import of_transformers

_IMAGE = normal(3, 16, 16)
_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
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
    "mask_decoder_config": {"hidden_size": 16, "mlp_dim": 32, "num_attention_heads": 4, "iou_head_hidden_dim": 16},
}
_IMAGE_TOKEN, _QUERIES, _WORDS = 63, 4, 6
_BLIP2 = {
    "vision_config": {**_VIT, "initializer_range": 0.02},
    "qformer_config": {**_SMALL, "vocab_size": 64, "encoder_hidden_size": 32, "max_position_embeddings": 32},
    "text_config": {"model_type": "opt", **language._OPT},
    "num_query_tokens": _QUERIES,
    "image_token_index": _IMAGE_TOKEN,
}


def _words_after_an_image(generator, samples):
    image = torch.full((samples, _QUERIES), _IMAGE_TOKEN)
    return torch.cat([image, torch.randint(3, _IMAGE_TOKEN, (samples, _WORDS), generator=generator)], dim=1)


def _vit(name, suffix, changes=None, **fields):
    more = {"loss": own_loss if fields else None, "no_effect": ("*attention.key.bias", "*attention.k_proj.bias")}
    fields, settings = {"pixel_values": _IMAGE, **fields}, {**_VIT, **(changes or {})}
    return of_transformers(f"transformers/vit{name}", "ViT", suffix, settings, fields, **more)


MODELS = (
    _vit("", "Model"),
    _vit("_classification", "ForImageClassification", {"num_labels": 3}, labels=numbers(3)),
    _vit("_masked", "ForMaskedImageModeling", {"encoder_stride": 4}, bool_masked_pos=same([True, False] * 8)),
    of_transformers(
        "transformers/sam",
        "Sam",
        "Model",
        _SAM,
        {"pixel_values": normal(3, 32, 32), "input_points": normal(1, 2, 2), "input_labels": same([[1, 0]])},
        no_effect=("*k_proj.bias",),
    ),
    of_transformers(
        "transformers/blip2",
        "Blip2",
        "ForConditionalGeneration",
        _BLIP2,
        {
            "pixel_values": _IMAGE,
            "input_ids": _words_after_an_image,
            "labels": numbers(_IMAGE_TOKEN, _QUERIES + _WORDS, low=3),
        },
        no_effect=("*key.bias", "*k_proj.bias"),
    ),
)
