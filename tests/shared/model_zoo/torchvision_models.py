"""Image classifiers of torchvision, with few layers and channels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.functional import cross_entropy

from model_zoo.fields import batch_of, normal, numbers
from model_zoo.registry import ZooModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from model_zoo.registry import Batch

_CLASSES = 10


def _of(kind: str, *arguments: Any, **settings: Any) -> Callable[[], nn.Module]:
    """Return a function that builds a model of torchvision."""

    def build() -> nn.Module:
        from torchvision import models

        model: nn.Module = getattr(models, kind)(*arguments, num_classes=_CLASSES, **settings)
        return model

    return build


def _classified(output: Tensor, batch: Batch) -> Tensor:
    return cross_entropy(output, batch["labels"])


def _one(name: str, build: Callable[[], nn.Module], **more: Any) -> ZooModel:
    return ZooModel(
        name=f"torchvision/{name}",
        build=build,
        batch=batch_of(x=normal(3, 32, 32), labels=numbers(_CLASSES)),
        loss=_classified,
        needs=("torchvision",),
        **more,
    )


MODELS = (
    _one("resnet18", _of("resnet18")),
    _one(
        "mobilenet_v2",
        _of(
            "MobileNetV2",
            width_mult=0.1,
            inverted_residual_setting=[[1, 8, 1, 1], [6, 16, 1, 2], [6, 24, 1, 2]],
            dropout=0.0,
        ),
        double=True,
    ),
    _one("vit", _of("VisionTransformer", 32, 8, 2, 4, 32, 64)),
)
