"""Random weights for a layer that is checked: they show what a model's own hide, and exist for lazy models too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn


def random_weights(layer: nn.Module, device: torch.device, seed: int) -> dict[str, Tensor]:
    """Return fp32 values for the parameters of a layer, by name, alike on ranks with the same kind of device.

    Args:
        layer: The layer.
        device: Where they are made.
        seed: Of their generator.
    """
    generator = torch.Generator(device).manual_seed(seed)
    found = {}
    for name, parameter in layer.named_parameters():
        values = torch.empty(parameter.shape, device=device)
        if parameter.dim() < 2:
            values.uniform_(0.5, 1.5, generator=generator)  # norms keep their scale
        else:
            values.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
        found[name] = values
    return found
