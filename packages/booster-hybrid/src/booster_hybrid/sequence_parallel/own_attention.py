"""Attention of models that do not use transformers' registry: by torch's function, or by a method of their own.

While a layer of a plain PyTorch model runs, ``torch.nn.functional.scaled_dot_product_attention`` attends from this
rank's positions to those of all ranks. GPT-J and Bloom attend by code of their own: that method is replaced on
each instance, by one that computes the same through `attention`. So what activation checkpointing computes again
attends likewise.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.overrides import TorchFunctionMode

from booster_core.errors import ConfigError
from booster_hybrid.sequence_parallel.attention import attention

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from booster_hybrid.sequence_parallel.stack import Stack


def replace_attention(layers: Sequence[nn.Module]) -> bool:
    """Let the attention of layers that do it themselves come in through `attention`, in place.

    Args:
        layers: The layers of a model.

    Returns:
        Whether there are such.

    Raises:
        ConfigError: If the attention is checkpointed already, or computed in slices.
    """
    modules = [module for layer in layers for module in layer.modules()]
    found = [(module, _FAMILIES[name]) for module in modules if (name := type(module).__name__) in _FAMILIES]
    for module, (method, function) in found:
        if method in vars(module):
            msg = (
                f"`{method}` of a {type(module).__name__} is replaced already, as activation checkpointing does. "
                "Enable it after `boost`, or for whole layers."
            )
            raise ConfigError(msg)
        if getattr(module, "slow_but_exact", False) and getattr(module, "pretraining_tp", 1) > 1:
            msg = "`slow_but_exact=True` sums slices of Bloom's projection, which split sequences do not. Leave it out."
            raise ConfigError(msg)
        vars(module)[method] = functools.partial(function, module)
    return bool(found)


def _of_gptj(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> tuple[Tensor, None]:
    """Stand for ``GPTJAttention._attn``: tensors of shape ``(batch, heads, positions, size)``."""
    outputs, _ = attention(
        module,
        query.to(value.dtype),
        key.to(value.dtype),
        value,
        attention_mask,
        dropout=_dropout(module, "attn_dropout"),
        scaling=1.0 / float(module.scale_attn),
    )
    return outputs.transpose(1, 2), None


def _of_bloom(
    module: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Any,
    layer_past: Any = None,
    use_cache: bool = False,  # noqa: FBT001, FBT002 - likewise
    output_attentions: bool = False,  # noqa: FBT001, FBT002
    **_: Any,
) -> tuple[Tensor, None]:
    """Stand for ``BloomAttention.forward``."""
    del use_cache, output_attentions
    query, key, value = module._reshape(module.query_key_value(hidden_states))  # noqa: SLF001 - the model's own
    outputs, _weights = attention(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=_dropout(module, "attention_dropout"),
        scaling=module.inv_norm_factor,
        position_bias=_by_head(alibi, query) * module.beta,
        cache=layer_past,
    )
    projected = module.dense(outputs.flatten(2))
    return residual + nn.functional.dropout(projected, module.hidden_dropout, module.training), None


def _dropout(module: Any, name: str) -> float:
    return float(getattr(module, name).p) if module.training else 0.0


def _by_head(alibi: Tensor, query: Tensor) -> Tensor:
    """Return biases of shape ``(batch, heads, 1, keys)``, from those of shape ``(batch * heads, 1, keys)``."""
    return alibi.reshape(query.shape[0], query.shape[1], 1, -1)


_FAMILIES: dict[str, tuple[str, Callable[..., Any]]] = {
    "GPTJAttention": ("_attn", _of_gptj),
    "BloomAttention": ("forward", _of_bloom),
}


def enter_through_sdpa(stack: Stack, layers: Sequence[nn.Module]) -> None:
    """Let torch's attention function attend across ranks inside of layers, in place.

    Args:
        stack: What the layers share.
        layers: The layers.

    Raises:
        ConfigError: If a layer's forward is replaced already.
    """
    for layer in layers:
        if "forward" in vars(layer):
            msg = (
                f"The forward of a {type(layer).__name__} is replaced already, as activation checkpointing does. With "
                f"`sequence_parallelism_mode={stack.mode!r}`, enable it after `boost`."
            )
            raise ConfigError(msg)
        vars(layer)["forward"] = functools.partial(_forward, layer)


def _forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Stand for the forward of a layer in which torch's attention function attends across ranks."""
    with _AcrossRanks(layer):
        return type(layer).forward(layer, *args, **kwargs)


class _AcrossRanks(TorchFunctionMode):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = layer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Attend across ranks, or call any other function as it is."""
        del types
        if func is nn.functional.scaled_dot_product_attention:
            return _attend(self._layer, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attend(
    layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - torch's
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002
) -> Tensor:
    """Stand for ``torch.nn.functional.scaled_dot_product_attention``."""
    if query.dim() != 4 or (key.shape[1] not in (1, query.shape[1]) and not enable_gqa):
        msg = (
            f"Split sequences need attention over tensors of shape (batch, heads, positions, size), but "
            f"`scaled_dot_product_attention` was given {tuple(query.shape)} and {tuple(key.shape)}."
        )
        raise ConfigError(msg)
    outputs, _ = attention(layer, query, key, value, attn_mask, dropout=dropout_p, scaling=scale, is_causal=is_causal)
    return outputs.transpose(1, 2)
