"""Image models of torchvision."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.functional import cross_entropy

from model_zoo.fields import batch_of, normal, numbers
from model_zoo.registry import ZooModel

if TYPE_CHECKING:
    from torch import Tensor, nn

    from model_zoo.registry import Batch

_CLASSES = 10


def _resnet18() -> nn.Module:
    from torchvision.models import resnet18

    model: nn.Module = resnet18(num_classes=_CLASSES)
    return model


def _classified(output: Tensor, batch: Batch) -> Tensor:
    return cross_entropy(output, batch["labels"])


MODELS = (
    ZooModel(
        name="torchvision/resnet18",
        build=_resnet18,
        batch=batch_of(x=normal(3, 32, 32), labels=numbers(_CLASSES)),
        loss=_classified,
        loss_only=("labels",),
        needs=("torchvision",),
        couples_samples=True,
    ),
)
