"""Frozen bases in 8 or 4 bits through bitsandbytes, for adapters that are trained on top of them.

Reference: Dettmers et al. 2023, "QLoRA" (arXiv:2305.14314).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig


def check_quantization(config: Any, device: torch.device) -> BitsAndBytesConfig:
    """Return how a base is to be quantised; 4 bits (nf4, twice quantised) where nothing is said.

    Raises:
        TypeError: If ``config`` is no ``transformers.BitsAndBytesConfig``.
        ConfigError: If the device is not CUDA, or bitsandbytes or transformers are not installed.

    Collective: none.
    """
    if device.type != "cuda":
        msg = f"A base can be quantised on CUDA only, and this run's device is '{device}'. Leave out `quantize`."
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

    Collective: none.
    """
    import bitsandbytes as bnb

    head = getattr(model, "get_output_embeddings", lambda: None)()
    skipped = config.llm_int8_skip_modules or []
    for path, layer in list(model.named_modules()):
        if type(layer) is not nn.Linear or layer is head or any(part in skipped for part in path.split(".")):
            continue
        has_bias = layer.bias is not None
        if config.load_in_4bit:
            packed = bnb.nn.Linear4bit(
                layer.in_features,
                layer.out_features,
                has_bias,
                compute_dtype=config.bnb_4bit_compute_dtype,
                compress_statistics=config.bnb_4bit_use_double_quant,
                quant_type=config.bnb_4bit_quant_type,
            )
            packed.weight = bnb.nn.Params4bit(
                layer.weight.detach(),
                requires_grad=False,
                compress_statistics=config.bnb_4bit_use_double_quant,
                quant_type=config.bnb_4bit_quant_type,
            )
        else:
            packed = bnb.nn.Linear8bitLt(
                layer.in_features,
                layer.out_features,
                has_bias,
                has_fp16_weights=config.llm_int8_has_fp16_weight,
                threshold=config.llm_int8_threshold,
            )
            packed.weight = bnb.nn.Int8Params(
                layer.weight.detach(), requires_grad=False, has_fp16_weights=config.llm_int8_has_fp16_weight
            )
        packed.bias = layer.bias
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, packed)
    # peft chooses its layers by these.
    model.is_loaded_in_4bit = bool(config.load_in_4bit)  # type: ignore[assignment]
    model.is_loaded_in_8bit = not config.load_in_4bit  # type: ignore[assignment]
