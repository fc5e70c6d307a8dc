"""diffusers models: an image quantizer and a denoiser."""

from functools import partial

from torch.nn.functional import mse_loss

from model_zoo.fields import batch_of, normal, numbers
from model_zoo.registry import ZooModel

_SMALL = {"block_out_channels": (8, 16), "norm_num_groups": 4}
_CODER = {
    **_SMALL,
    "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
    "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
}
_VQ, _KL = {**_CODER, "num_vq_embeddings": 16}, {**_CODER, "latent_channels": 4}
_DENOISER = {**_SMALL, "sample_size": 8, "layers_per_block": 1, "attention_head_dim": 4}
_UNET = {
    **_DENOISER,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}
_CONDITIONED = {
    **_DENOISER,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 16,
}
_DIT = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "sample_size": 8,
    "patch_size": 2,
    "num_embeds_ada_norm": 10,
    "norm_num_groups": 4,
    "dropout": 0.0,
}


def _build(name, settings):
    import diffusers

    model = getattr(diffusers, name)(**settings)
    for module in model.modules():
        if hasattr(module, "dropout_prob"):  # of class labels
            module.dropout_prob = 0.0
    return model


def _reconstruction(output, batch):
    return mse_loss(output.sample, batch["sample"]) + output.commit_loss.mean()


def _image(output, batch):
    return mse_loss(output.sample, batch["sample"])


def _noise(output, batch):
    return mse_loss(output.sample, batch["noise"])


def _one(name, kind, settings, loss, fields, no_effect=()):
    build, batch = partial(_build, kind, settings), batch_of(**fields)
    return ZooModel(
        name=f"diffusers/{name}", build=build, batch=batch, loss=loss, needs=("diffusers",), no_effect=no_effect
    )


_PIXELS, _LATENTS, _TIMES = normal(3, 8, 8), normal(4, 8, 8), {"timestep": numbers(100)}
_OF_KEYS = ("*to_k.bias",)
_CONDITIONS = {"encoder_hidden_states": normal(5, 16)}
_CLASSES = {"class_labels": numbers(9)}
MODELS = (
    _one("vq_model", "VQModel", _VQ, _reconstruction, {"sample": _PIXELS}, _OF_KEYS),
    _one("unet2d", "UNet2DModel", _UNET, _noise, {"sample": _PIXELS, **_TIMES, "noise": _PIXELS}, _OF_KEYS),
    _one("autoencoder_kl", "AutoencoderKL", _KL, _image, {"sample": _PIXELS}, _OF_KEYS),
    _one(
        "unet2d_conditioned",
        "UNet2DConditionModel",
        _CONDITIONED,
        _noise,
        {"sample": _LATENTS, **_TIMES, **_CONDITIONS, "noise": _LATENTS},
    ),
    _one(
        "dit",
        "DiTTransformer2DModel",
        _DIT,
        _noise,
        {"hidden_states": _LATENTS, **_TIMES, **_CLASSES, "noise": _LATENTS},
    ),
)
