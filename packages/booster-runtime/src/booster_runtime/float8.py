"""Linear layers that multiply in 8-bit floating point, through torchao, where the device has such units.

Parameters, gradients and optimizer state keep their format; inputs, weights and incoming gradients are cast for each
product, with a scale per tensor. So a rank's scales depend on its own samples, under data parallelism of any kind.
Reference: Micikevicius et al. 2022, "FP8 Formats for Deep Learning" (arXiv:2209.05433).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_core.errors import ConfigError
from booster_core.plugin import ModelWrapper

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchao.float8 import Float8LinearConfig

__all__ = ["convert_to_float8"]

_MULTIPLE = 16
"""Both sizes of a weight are multiples of this, for the units that multiply in 8 bits."""
_CAPABILITY = (8, 9)
"""NVIDIA's Ada and Hopper generations were the first to have them."""


def convert_to_float8(
    model: nn.Module,
    by: Callable[[str, nn.Module], bool] | None = None,
    *,
    config: Float8LinearConfig | None = None,
) -> list[str]:
    """Replace linear layers by torchao's, in place, before `boost`; their parameters stay the same objects.

    Trains under every plugin but a tensor-parallel one, which refuses such layers. They are fast under
    ``torch.compile`` only.

    Args:
        model: The user's model.
        by: Which layers: a function of a linear layer's name and the layer. By default all whose sizes are multiples of
            16, except the output head of a transformers model.
        config: torchao's settings; scales per tensor by default. With ``emulate=True`` any device computes what the
            units would, slowly, for tests.

    Returns:
        The names of the layers that were replaced.

    Raises:
        TypeError: If ``model`` is not a module, or ``config`` of another type.
        ConfigError: If torchao is not installed, the device can't multiply in 8 bits, the model was boosted already or
            is a linear layer itself, no layer is meant or one whose sizes are not multiples of 16, or weights are to
            travel in 8 bits (``enable_fsdp_float8_all_gather``). Nothing is changed then.

    Collective: none, but every rank must do the same.
    """
    if not isinstance(model, nn.Module):
        msg = f"`convert_to_float8` needs a torch.nn.Module; got `{type(model).__name__}`."
        raise TypeError(msg)
    if isinstance(model, (ModelWrapper, nn.Linear)):
        found = type(model).__name__
        msg = f"`convert_to_float8` replaces layers inside of a user's model before `boost`; got `{found}`."
        raise ConfigError(msg)
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        msg = "Layers in 8 bits need torchao. Run `pip install torchao`."
        raise ConfigError(msg) from error
    settings = Float8LinearConfig() if config is None else config
    if not isinstance(settings, Float8LinearConfig):
        msg = f"`config` must be a torchao.float8.Float8LinearConfig; got `{type(config).__name__}`."
        raise TypeError(msg)
    if settings.enable_fsdp_float8_all_gather:
        msg = "Weights travel in the precision of `boost`. Leave out `enable_fsdp_float8_all_gather`."
        raise ConfigError(msg)
    if not settings.emulate:
        _check_device()
    chosen = _chosen(model, by)
    convert_to_float8_training(model, module_filter_fn=lambda module, _: module in chosen, config=settings)
    return [*chosen.values()]


def _check_device() -> None:
    if torch.version.hip is not None:
        return  # torchao says itself what it supports there
    found = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if found is None or found < _CAPABILITY:
        have = "this machine has no CUDA device" if found is None else f"this one has {found[0]}.{found[1]}"
        msg = (
            f"Products in 8 bits need a device of compute capability 8.9 or later, and {have}. Train in bf16, or pass "
            "`config=Float8LinearConfig(emulate=True)` to try what they would give."
        )
        raise ConfigError(msg)


def _chosen(model: nn.Module, by: Callable[[str, nn.Module], bool] | None) -> dict[nn.Module, str]:
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    linears = {module: name for name, module in model.named_modules() if type(module) is nn.Linear}
    chosen: dict[nn.Module, str] = {}
    for module, name in linears.items():
        fits = module.in_features % _MULTIPLE == module.out_features % _MULTIPLE == 0
        if by is None:
            if fits and module is not head:
                chosen[module] = name
        elif by(name, module):
            if not fits:
                msg = (
                    f"'{name}' maps {module.in_features} to {module.out_features} features, which are not both "
                    f"multiples of {_MULTIPLE}. Leave it out by `by`."
                )
                raise ConfigError(msg)
            chosen[module] = name
    if not chosen:
        msg = (
            f"None of the {len(linears)} linear layers of `{type(model).__name__}` is meant, or has sizes that are "
            f"multiples of {_MULTIPLE}."
        )
        raise ConfigError(msg)
    return chosen
