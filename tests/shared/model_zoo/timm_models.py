"""Image models of timm: a few for the zoo, and one of each family."""

from functools import partial

from model_zoo.fields import batch_of, normal, numbers
from model_zoo.registry import ZooModel, classified

CLASSES = 10


def _build(name, settings):
    import timm

    return timm.create_model(name, num_classes=CLASSES, **settings)


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
        loss=classified,
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

_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
_ALL_PATHS = {"drop_path_rate": 0.0}
"""What is drawn on ranks is not what one process draws."""
_FAMILIES = {
    "beit": ("beit_base_patch16_224", _VIT),
    "beitv2": ("beitv2_base_patch16_224", _VIT),
    "cait": ("cait_xxs24_224", _VIT),
    "deit_distilled": ("deit_tiny_distilled_patch16_224", _VIT),
    "deit3": ("deit3_small_patch16_224", _VIT),
    "coat_lite": (
        "coat_lite_tiny",
        {"img_size": 32, "embed_dims": (32, 32, 32, 32), "serial_depths": (1, 1, 1, 1)},
    ),
    "convnext": ("convnext_atto", {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (1, 2), "num_heads": (2, 4), **_ALL_PATHS},
    ),
    "swinv2": (
        "swinv2_tiny_window8_256",
        {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (1, 2), "num_heads": (2, 4), **_ALL_PATHS},
    ),
    "twins_svt": (
        "twins_svt_small",
        {
            "img_size": 32,
            "embed_dims": (8, 16, 16, 32),
            "num_heads": (1, 2, 2, 4),
            "depths": (1, 1, 1, 1),
            "wss": (1, 1, 1, 1),
        },
    ),
    "mambaout": ("test_mambaout", {}),
    "nfnet": ("test_nfnet", {}),
}
_WITH_BATCH_NORM = {
    "densenet": ("densenet121", {"growth_rate": 4, "block_config": (2, 2)}),
    "dla": ("dla34", {"channels": [4, 4, 8, 8, 16, 16], "levels": [1, 1, 1, 1, 1, 1]}),
    "efficientnet": ("test_efficientnet", {}),
    "rexnet": ("rexnet_100", {"width_mult": 0.2, "depth_mult": 0.2}),
    "resnest": ("resnest14d", {"channels": (8, 8, 16, 16), "zero_init_last": False}),
    "skresnet": ("skresnet18", {"layers": (1, 1, 1, 1), "channels": (16, 16, 32, 32), "zero_init_last": False}),
    "wide_resnet": ("wide_resnet50_2", {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16), "zero_init_last": False}),
    "xcit": ("xcit_nano_12_p16_224", _VIT),
}


def _mixer(kind):
    from timm import layers
    from timm.models import mlp_mixer

    settings = {
        "mixer": {},
        "resmlp": {"mlp_ratio": 4, "block_layer": mlp_mixer.ResBlock, "norm_layer": mlp_mixer.Affine},
        "gmlp": {"mlp_ratio": 2, "block_layer": mlp_mixer.SpatialGatingBlock, "mlp_layer": layers.GatedMlp},
    }
    sizes = {"img_size": 32, "patch_size": 8, "num_blocks": 2, "embed_dim": 32}
    return mlp_mixer.MlpMixer(num_classes=CLASSES, **sizes, **settings[kind])


def _convmixer():
    from timm.models.convmixer import ConvMixer

    return ConvMixer(dim=32, depth=2, kernel_size=3, patch_size=4, num_classes=CLASSES)


FAMILIES = (
    *(timm_model(name, original, settings) for name, (original, settings) in _FAMILIES.items()),
    *(timm_model(name, original, settings, double=True) for name, (original, settings) in _WITH_BATCH_NORM.items()),
    *(timm_model(kind, partial(_mixer, kind)) for kind in ("mixer", "resmlp", "gmlp")),
    timm_model("convmixer", _convmixer, double=True),
)
"""One of each of timm's families."""
