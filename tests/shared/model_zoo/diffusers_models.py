"""diffusers models: an image quantizer and a denoiser."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch.nn.functional import mse_loss

from model_zoo.fields import batch_of, normal, numbers
from model_zoo.registry import ZooModel

if TYPE_CHECKING:
    from torch import Tensor, nn

    from model_zoo.registry import Batch

_VQ: dict[str, Any] = {
    "block_out_channels": (8, 16),
    "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
    "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
    "norm_num_groups": 4,
    "num_vq_embeddings": 16,
}
_UNET: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 4,
}


def _build(name: str, settings: dict[str, Any]) -> nn.Module:
    import diffusers

    model: nn.Module = getattr(diffusers, name)(**settings)
    return model


def _reconstruction(output: Any, batch: Batch) -> Tensor:
    loss: Tensor = mse_loss(output.sample, batch["sample"]) + output.commit_loss.mean()
    return loss


def _noise(output: Any, batch: Batch) -> Tensor:
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
        loss_only=("noise",),
        needs=("diffusers",),
        no_effect=("*to_k.bias",),
    ),
)
