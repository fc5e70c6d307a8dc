"""diffusers models: an image quantizer and a denoiser."""

from functools import partial

from torch.nn.functional import mse_loss

from model_zoo.fields import batch_of, normal, numbers
from model_zoo.registry import ZooModel

_VQ = {
    "block_out_channels": (8, 16),
    "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
    "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
    "norm_num_groups": 4,
    "num_vq_embeddings": 16,
}
_UNET = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 4,
}
_KL = {
    "block_out_channels": (8, 16),
    "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
    "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
    "norm_num_groups": 4,
    "latent_channels": 4,
}
_CONDITIONED = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (8, 16),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 4,
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


MODELS = (
    ZooModel(
        name="diffusers/vq_model",
        build=partial(_build, "VQModel", _VQ),
        batch=batch_of(sample=normal(3, 8, 8)),
        loss=_reconstruction,
        needs=("diffusers",),
        no_effect=("*to_k.bias",),
    ),
    ZooModel(
        name="diffusers/unet2d",
        build=partial(_build, "UNet2DModel", _UNET),
        batch=batch_of(sample=normal(3, 8, 8), timestep=numbers(100), noise=normal(3, 8, 8)),
        loss=_noise,
        needs=("diffusers",),
        no_effect=("*to_k.bias",),
    ),
    ZooModel(
        name="diffusers/autoencoder_kl",
        build=partial(_build, "AutoencoderKL", _KL),
        batch=batch_of(sample=normal(3, 8, 8)),
        loss=_image,
        needs=("diffusers",),
        no_effect=("*to_k.bias",),
    ),
    ZooModel(
        name="diffusers/unet2d_conditioned",
        build=partial(_build, "UNet2DConditionModel", _CONDITIONED),
        batch=batch_of(
            sample=normal(4, 8, 8),
            timestep=numbers(100),
            encoder_hidden_states=normal(5, 16),
            noise=normal(4, 8, 8),
        ),
        loss=_noise,
        needs=("diffusers",),
    ),
    ZooModel(
        name="diffusers/dit",
        build=partial(_build, "DiTTransformer2DModel", _DIT),
        batch=batch_of(
            hidden_states=normal(4, 8, 8), timestep=numbers(100), class_labels=numbers(9), noise=normal(4, 8, 8)
        ),
        loss=_noise,
        needs=("diffusers",),
    ),
)
