"""Image models of timm."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch.nn.functional import cross_entropy

from model_zoo.fields import batch_of, normal, numbers
from model_zoo.registry import ZooModel

if TYPE_CHECKING:
    from torch import Tensor, nn

    from model_zoo.registry import Batch

_CLASSES = 10


def _build(name: str, settings: dict[str, Any]) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, num_classes=_CLASSES, **settings)
    return model


def _classified(output: Tensor, batch: Batch) -> Tensor:
    return cross_entropy(output, batch["labels"])


def _timm(name: str, original: str, size: int, settings: dict[str, Any], **more: Any) -> ZooModel:
    return ZooModel(
        name=f"timm/{name}",
        build=partial(_build, original, settings),
        batch=batch_of(x=normal(3, size, size), labels=numbers(_CLASSES)),
        loss=_classified,
        loss_only=("labels",),
        needs=("timm",),
        no_effect=("*pos_proj.bias", "*attn.k.bias"),
        **more,
    )


MODELS = (
    _timm(
        "convit_base",
        "convit_base",
        32,
        {"img_size": 32, "patch_size": 8, "embed_dim": 4, "depth": 3, "local_up_to_layer": 2},
    ),
    _timm(
        "convit_tiny",
        "convit_tiny",
        32,
        {"img_size": 32, "patch_size": 8, "depth": 3, "local_up_to_layer": 2},
    ),
    _timm("convit_base_whole", "convit_base", 32, {"img_size": 32}, slow=True),
    _timm("resnet", "test_resnet", 32, {"zero_init_last": False}, couples_samples=True, slow=True),
    _timm("vit", "test_vit", 32, {"img_size": 32, "patch_size": 8}),
)
