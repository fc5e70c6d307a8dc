"""Tiny models of common libraries, built from configs with random weights, without network access.

``ZOO`` has them by name. Building one imports its library; libraries in the separate folder (timm, diffusers, torchrec,
torchvision) become importable then.
"""

from dataclasses import replace

from isolated_libraries import import_quietly, use_isolated_libraries

from model_zoo.diffusers_models import MODELS as _DIFFUSERS
from model_zoo.own_models import MODELS as _OWN
from model_zoo.registry import Batch, ZooModel
from model_zoo.timm_models import FAMILIES as _TIMM_FAMILIES
from model_zoo.timm_models import MODELS as _TIMM
from model_zoo.torchrec_models import MODELS as _TORCHREC
from model_zoo.torchvision_models import MODELS as _TORCHVISION
from model_zoo.transformers_audio import MODELS as _AUDIO
from model_zoo.transformers_encoders import MODELS as _ENCODERS
from model_zoo.transformers_families import MODELS as _FAMILIES
from model_zoo.transformers_heads import HEADS
from model_zoo.transformers_language import MODELS as _LANGUAGE
from model_zoo.transformers_vision import MODELS as _VISION

ZOO = {
    model.name: model
    for model in (*_LANGUAGE, *_ENCODERS, *_VISION, *_AUDIO, *_TIMM, *_DIFFUSERS, *_TORCHREC, *_TORCHVISION)
}

_TWICE = (
    *("llama", "mistral", "mixtral", "qwen2", "gemma", "phi", "deepseek_v3"),
    *("cohere", "glm", "gptj", "opt", "bloom", "falcon"),
)
"""Families whose language model is in both tables."""

MATRIX = {
    **ZOO,
    **{
        model.name: model
        for model in (replace(each, name=each.name.replace("heads/", "transformers/")) for each in HEADS.values())
        if model.name not in {f"transformers/{family}_lm" for family in _TWICE}
    },
    **{model.name: model for model in (*_OWN, *_FAMILIES, *_TIMM_FAMILIES)},
}
"""Every model, by name: those of ``ZOO``, which other tests use too, and those of the compatibility matrix alone."""


def get_model(name):
    """Return a model of the zoo by name; import its library without warnings.

    Raises:
        KeyError: If there is no model of that name.
    """
    model = {**MATRIX, **HEADS}[name]
    if model.needs not in {(), ("transformers",)}:
        use_isolated_libraries()
    import_quietly(model.needs)
    return model


def deepened(name, **settings):
    """Return a model of transformers with four layers of one kind, and other settings of its configuration."""
    zoo = get_model(name)
    model = zoo.seeded()
    for key, value in {"num_hidden_layers": 4, **settings}.items():
        setattr(model.config, key, value)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[0]] * 4
    return replace(zoo, build=lambda: type(model)(model.config)).seeded()


__all__ = ["MATRIX", "ZOO", "Batch", "ZooModel", "deepened", "get_model"]
