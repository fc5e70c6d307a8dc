"""Image classifiers of torchvision, with few layers and channels."""

from torch import nn

from model_zoo.fields import batch_of, normal, numbers
from model_zoo.registry import ZooModel, classified

_CLASSES = 10


def _of(kind, *arguments, **settings):
    """Return a function that builds a model of torchvision."""

    def build():
        from torchvision import models

        return getattr(models, kind)(*arguments, num_classes=_CLASSES, **settings)

    return build


def _efficientnet():
    from torchvision.models.efficientnet import EfficientNet, MBConvConfig

    layers = [MBConvConfig(1, 3, 1, 16, 8, 1), MBConvConfig(6, 3, 2, 8, 16, 1)]
    return EfficientNet(layers, dropout=0.0, num_classes=_CLASSES, last_channel=32, stochastic_depth_prob=0.0)


def _convnext():
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    layers = [CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)]
    return ConvNeXt(layers, layer_scale=0.5, num_classes=_CLASSES)


def _vgg():
    """Return VGG's features with a small head: the sizes of its own are fixed."""
    from torchvision.models.vgg import make_layers

    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, _CLASSES))
    return nn.Sequential(*make_layers([8, "M", 16, "M"]), *head)


def _one(name, build, image="x", **more):
    return ZooModel(
        name=f"torchvision/{name}",
        build=build,
        batch=batch_of(**{image: normal(3, 32, 32)}, labels=numbers(_CLASSES)),
        loss=classified,
        needs=("torchvision",),
        **more,
    )


_NORMALIZED = {"double": True}

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
        **_NORMALIZED,
    ),
    _one("mobilenet_v3_small", _of("mobilenet_v3_small", width_mult=0.1), **_NORMALIZED),
    _one("mnasnet", _of("MNASNet", 0.1, dropout=0.0), **_NORMALIZED),
    _one("shufflenet", _of("ShuffleNetV2", [1, 1, 1], [8, 8, 16, 16, 32]), **_NORMALIZED),
    _one("densenet", _of("DenseNet", growth_rate=4, block_config=(2, 2), num_init_features=8), **_NORMALIZED),
    _one("efficientnet", _efficientnet, **_NORMALIZED),
    _one("squeezenet", _of("SqueezeNet", "1_1", dropout=0.0)),
    _one("vgg", _vgg, "input"),
    _one("convnext", _convnext),
    _one("vit", _of("VisionTransformer", 32, 8, 2, 4, 32, 64)),
    _one("swin", _of("SwinTransformer", [4, 4], 16, [1, 1], [2, 4], [4, 4], stochastic_depth_prob=0.0)),
)
