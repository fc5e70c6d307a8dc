"""Tiny models of common libraries, built from configs with random weights, without network access.

``ZOO`` has them by name. Building one imports its library; libraries in the separate folder (timm, diffusers, torchrec,
torchvision) become importable then.
"""

from __future__ import annotations

from isolated_libraries import import_quietly, use_isolated_libraries

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
    """Return a model of the zoo by name; import its library without warnings.

    Raises:
        KeyError: If there is no model of that name.
    """
    model = ZOO[name]
    if model.needs != ("transformers",):
        use_isolated_libraries()
    import_quietly(model.needs)
    return model


__all__ = ["ZOO", "Batch", "ZooModel", "get_model"]
