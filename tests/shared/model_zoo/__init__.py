"""Tiny models of the libraries that people train, built from configs with random weights: no network, no hub.

``ZOO`` has them by name. Building one imports its library, so only processes that build see transformers and the like;
those that are installed apart (timm, diffusers, torchrec, torchvision) become importable on the way.
"""

from __future__ import annotations

from apart import import_quietly, use_libraries_apart

from model_zoo.diffusers_models import MODELS as _DIFFUSERS
from model_zoo.registry import Batch, ZooModel
from model_zoo.timm_models import MODELS as _TIMM
from model_zoo.torchrec_models import MODELS as _TORCHREC
from model_zoo.torchvision_models import MODELS as _TORCHVISION
from model_zoo.transformers_audio import MODELS as _AUDIO
from model_zoo.transformers_encoders import MODELS as _ENCODERS
from model_zoo.transformers_language import MODELS as _LANGUAGE
from model_zoo.transformers_vision import MODELS as _VISION

ZOO: dict[str, ZooModel] = {
    model.name: model
    for model in (*_LANGUAGE, *_ENCODERS, *_VISION, *_AUDIO, *_TIMM, *_DIFFUSERS, *_TORCHREC, *_TORCHVISION)
}


def get_model(name: str) -> ZooModel:
    """Return a model of the zoo by name, with its library imported, as quietly as it goes.

    Raises:
        KeyError: If there is none of that name.
    """
    model = ZOO[name]
    if model.needs != ("transformers",):
        use_libraries_apart()
    import_quietly(model.needs)
    return model


__all__ = ["ZOO", "Batch", "ZooModel", "get_model"]
