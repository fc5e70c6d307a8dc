"""Frozen bases in 8 or 4 bits through transformers and bitsandbytes, for adapters that are trained on top of them.

Reference: Dettmers et al. 2023, "QLoRA" (arXiv:2305.14314).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_core.errors import ConfigError, shorten

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig

_NOT_PACKED = (nn.Embedding, nn.modules.conv._ConvNd)  # noqa: SLF001 - the convolutions' base has no public name
"""Layers that libraries keep in full precision, as everyone expects."""


def check_quantization(config: Any, device: torch.device) -> BitsAndBytesConfig:
    """Return how a base is quantised; 4 bits (nf4, twice quantised) where nothing is said.

    Raises:
        TypeError: If ``config`` is no ``transformers.BitsAndBytesConfig``.
        ConfigError: If the device is neither CUDA nor the CPU, or bitsandbytes or transformers are not installed.
    """
    if device.type not in ("cuda", "cpu"):
        msg = f"A base is quantised on CUDA and the CPU, and this run's device is '{device}'. Leave out `quantize`."
        raise ConfigError(msg)
    try:
        import bitsandbytes  # type: ignore[import-not-found,unused-ignore]  # noqa: F401 - whether it is there
        from transformers import BitsAndBytesConfig
    except ImportError as error:
        msg = "A quantised base needs bitsandbytes and transformers. Run `pip install bitsandbytes transformers`."
        raise ConfigError(msg) from error
    if config is None:
        return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    if not isinstance(config, BitsAndBytesConfig):
        msg = f"`bnb_quantization_config` must be a transformers.BitsAndBytesConfig; got `{type(config).__name__}`."
        raise TypeError(msg)
    return config


def quantize_linears(model: nn.Module, config: BitsAndBytesConfig) -> None:
    """Replace a model's linear layers by quantised ones, in place; values are packed when they reach the device.

    The output head, and what ``config.llm_int8_skip_modules`` names, stay as they are.

    Raises:
        ConfigError: If other layers hold matrices, which transformers' integration does not quantise.
    """
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.quantizers_utils import should_convert_module

    head = getattr(model, "get_output_embeddings", lambda: None)()
    skipped = [*(config.llm_int8_skip_modules or [])]
    skipped += [path for path, layer in model.named_modules() if layer is head]
    before = {path: layer for path, layer in model.named_modules() if should_convert_module(path, skipped)}
    left_alone = [
        path
        for path, layer in before.items()
        if type(layer) is not nn.Linear and not isinstance(layer, (Conv1D, *_NOT_PACKED)) and _has_matrices(layer)
    ]
    if left_alone:
        msg = (
            f"{len(left_alone)} layers of `{type(model).__name__}` hold matrices that can't be quantised: "
            f"{shorten(left_alone)}. Name them in `llm_int8_skip_modules` of a `bnb_quantization_config` to keep them "
            "in full precision."
        )
        raise ConfigError(msg)
    replace_with_bnb_linear(model, skipped, config)
    for path, packed in model.named_modules():
        source = before.get(path)
        if isinstance(source, (nn.Linear, Conv1D)) and packed is not source:
            values = source.weight.detach()
            values = values.T.contiguous() if isinstance(source, Conv1D) else values
            kind, options = type(packed.weight), vars(packed.weight)
            packed.weight = kind(values, requires_grad=False, **options)
            packed.bias = source.bias
    # peft chooses its layers by these.
    model.is_loaded_in_4bit = bool(config.load_in_4bit)  # type: ignore[assignment]
    model.is_loaded_in_8bit = not config.load_in_4bit  # type: ignore[assignment]


def _has_matrices(layer: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in layer.parameters(recurse=False))
