"""Image models of timm."""

from functools import partial

from torch.nn.functional import cross_entropy

from model_zoo.fields import batch_of, normal, numbers
from model_zoo.registry import ZooModel

CLASSES = 10


def _build(name, settings):
    import timm

    return timm.create_model(name, num_classes=CLASSES, **settings)


def _classified(output, batch):
    return cross_entropy(output, batch["labels"])


def timm_model(name, original, settings=None, **more):
    """Return the entry of an image classifier for images of 32 x 32.

    Args:
        name: The model's name in the zoo.
        original: The model's name in timm, or a function that returns the model.
        settings: Changes of the named model's settings.
        **more: As for `ZooModel`.
    """
    return ZooModel(
        name=f"timm/{name}",
        build=partial(_build, original, settings or {}) if isinstance(original, str) else original,
        batch=batch_of(x=normal(3, 32, 32), labels=numbers(CLASSES)),
        loss=_classified,
        needs=("timm",),
        no_effect=("*pos_proj.bias", "*attn.k.bias"),
        **more,
    )


MODELS = (
    timm_model(
        "convit_base",
        "convit_base",
        {"img_size": 32, "patch_size": 8, "embed_dim": 4, "depth": 3, "local_up_to_layer": 2},
    ),
    timm_model(
        "convit_tiny",
        "convit_tiny",
        {"img_size": 32, "patch_size": 8, "depth": 3, "local_up_to_layer": 2},
    ),
    timm_model("convit_base_wide", "convit_base", {"img_size": 32, "depth": 3, "local_up_to_layer": 2}),
    timm_model("resnet", "test_resnet", {"zero_init_last": False}),
    timm_model("vit", "test_vit", {"img_size": 32, "patch_size": 8}),
)
