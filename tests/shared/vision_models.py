"""Tiny vision-language models of transformers, and their batches: with images, of text alone, and of both.

Configurations are shrunk as those of the families. An image has four by four patches; a sample has one image or none.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from family_models import fill, tiny_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

SAMPLES, LENGTH = 4, 22
_IMAGE_TOKEN, _BEGIN = 60, 62
"""What stands for the features of an image, and is before these; text has smaller tokens."""
_BEFORE = 3
"""Where the first token of an image is."""
_PATCH, _SIDE = 4, 16


def _plain(number, generator):
    return {"pixel_values": torch.randn(number, 3, _SIDE, _SIDE, generator=generator)}


def _with_sizes(number, generator):
    return {**_plain(number, generator), "image_sizes": torch.tensor([[_SIDE, _SIDE]] * number)}


def _by_sample(number, generator):
    return {"pixel_values": _plain(number, generator)["pixel_values"][:, None]}


def _in_tiles(number, generator):
    side = _SIDE // 2
    pixels = torch.randn(number, 2, 3, side, side, generator=generator)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[side, side]] * number)}


def _patches(number, generator, *shape):
    grid = torch.tensor([[1, _SIDE // _PATCH, _SIDE // _PATCH]] * number)
    patches = number * (_SIDE // _PATCH) ** 2
    return {
        "pixel_values": torch.randn(patches, *(shape or (6 * _PATCH**2,)), generator=generator),
        "image_grid_thw": grid,
    }


def _square_patches(number, generator):
    return _patches(number, generator, 3, _PATCH, _PATCH)


@dataclass(frozen=True)
class VisionModel:
    """A model of the table.

    Args:
        tokens: Number of tokens of an image.
        pixels: Returns what the model takes of a number of images.
        settings: Of the configuration, beyond those of `tiny_config`.
        kinds: The argument that tells which tokens are of an image; ``None`` for models that take none.
    """

    tokens: int
    pixels: Callable[[int, torch.Generator], dict[str, Tensor]]
    settings: dict[str, Any]
    kinds: str | None = None


_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
_INDEX, _ID = {"image_token_index": _IMAGE_TOKEN}, {"image_token_id": _IMAGE_TOKEN}
_OF_QWEN = {"vision_start_token_id": _BEGIN, "vision_end_token_id": 63}
_QWEN = {**_ID, **_OF_QWEN, "video_token_id": 61, "text_config": _ROPE}
_DEEPSTACK = {**_QWEN, "vision_config": {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}}
_GLM = {**_ID, "video_token_id": 61, "text_config": _ROPE, "image_start_token_id": _BEGIN, "image_end_token_id": 63}
_OMNI = {**_INDEX, **_OF_QWEN, "video_token_index": 61, "audio_token_index": 59, "text_config": _ROPE}
_SMALL_IMAGES = {"image_grid_pinpoints": [[_SIDE // 2, _SIDE // 2]], "vision_config": {"image_size": _SIDE // 2}}
_KINDS_OF_GEMMA = "token_type_ids"
VISION_MODELS = {
    "aya_vision": VisionModel(4, _plain, _INDEX),
    "deepseek_vl": VisionModel(16, _plain, _ID),
    "gemma3": VisionModel(4, _plain, {**_INDEX, **_ID, "mm_tokens_per_image": 4}, _KINDS_OF_GEMMA),
    "glm4v": VisionModel(4, _patches, _GLM, "mm_token_type_ids"),
    "idefics3": VisionModel(4, _by_sample, _ID),
    "internvl": VisionModel(
        4, _plain, {**_ID, "vision_config": {"image_size": [_SIDE, _SIDE], "patch_size": [_PATCH, _PATCH]}}
    ),
    "kimi_k25": VisionModel(4, _square_patches, {**_QWEN, "text_config": {}, "projection_hidden_size": 32}),
    "llama4": VisionModel(4, _plain, {**_INDEX, "vision_config": {"intermediate_size": 128}}),
    "llava": VisionModel(16, _plain, _INDEX),
    "llava_onevision": VisionModel(10, _in_tiles, {**_INDEX, "video_token_index": 61, **_SMALL_IMAGES}),
    "mistral3": VisionModel(4, _with_sizes, _INDEX),
    "paligemma": VisionModel(16, _plain, _INDEX, _KINDS_OF_GEMMA),
    "qwen2_5_omni_thinker": VisionModel(4, _patches, _OMNI),
    "qwen2_5_vl": VisionModel(4, _patches, _QWEN, "mm_token_type_ids"),
    "qwen3_5": VisionModel(4, _patches, _DEEPSTACK, "mm_token_type_ids"),
    "qwen3_vl": VisionModel(4, _patches, _DEEPSTACK, "mm_token_type_ids"),
    "qwen3_vl_moe": VisionModel(4, _patches, _DEEPSTACK, "mm_token_type_ids"),
    "smolvlm": VisionModel(4, _by_sample, _ID),
}
"""The models, by their model types."""


def build_vision(name):
    """Return a tiny model with random weights, the same under the same seed.

    Args:
        name: The model type.
    """
    from transformers import AutoModelForImageTextToText

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the model's own configuration
        model = AutoModelForImageTextToText.from_config(tiny_config(name, VISION_MODELS[name].settings))
    fill(model)
    return model.train()


def vision_batch(name, with_images, length=LENGTH):
    """Return a batch.

    Args:
        name: The model type.
        with_images: For each sample, whether it has an image.
        length: Number of tokens of each.
    """
    model = VISION_MODELS[name]
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(3, 50, (len(with_images), length), generator=generator)
    labels = tokens.clone()
    has_image = torch.tensor(with_images)
    place = slice(_BEFORE, _BEFORE + model.tokens)
    tokens[has_image, place], labels[has_image, place] = _IMAGE_TOKEN, -100
    if _BEGIN in model.settings.values():
        tokens[has_image, _BEFORE - 1] = _BEGIN
    batch = {"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)}
    if model.kinds is not None:
        batch[model.kinds] = (tokens == _IMAGE_TOKEN).long()
    if any(with_images):
        batch |= model.pixels(sum(with_images), generator)
    return batch
