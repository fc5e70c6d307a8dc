"""Attention of model families that neither use transformers' registry nor torch's function: GPT-J, Bloom and Falcon.

The method that attends is replaced on each instance, by one that computes the same through `attention`. So what
activation checkpointing computes again attends likewise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from booster_core.errors import ConfigError
from booster_hybrid.sequence_parallel.attention import attention

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


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
        vars(module)[method] = _Bound(module, function)
    return bool(found)


class _Bound:
    """A function with a module as its first argument, without a reference that copies would share."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self._module, self._function = module, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._module, *args, **kwargs)


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


def _of_falcon(
    module: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Any,
    position_ids: Tensor | None = None,
    layer_past: Any = None,
    use_cache: bool = False,  # noqa: FBT001, FBT002 - likewise
    output_attentions: bool = False,  # noqa: FBT001, FBT002
    position_embeddings: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Stand for ``FalconAttention.forward``."""
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    del position_ids, use_cache, output_attentions
    parts = module._split_heads(module.query_key_value(hidden_states))  # noqa: SLF001 - the model's own
    query, key, value = (part.transpose(1, 2) for part in parts)
    bias, dropout = None, 0.0
    if alibi is None:
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)  # type: ignore[no-untyped-call]
    else:
        bias, dropout = _by_head(alibi, query) * module.inv_norm_factor, _dropout(module, "attention_dropout")
    outputs, _weights = attention(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout,
        scaling=module.inv_norm_factor,
        position_bias=bias,
        cache=layer_past,
    )
    return module.dense(outputs.flatten(2)), None


def _dropout(module: Any, name: str) -> float:
    return float(getattr(module, name).p) if module.training else 0.0


def _by_head(alibi: Tensor, query: Tensor) -> Tensor:
    """Return biases of shape ``(batch, heads, 1, keys)``, from those of shape ``(batch * heads, 1, keys)``."""
    return alibi.reshape(query.shape[0], query.shape[1], 1, -1)


_FAMILIES: dict[str, tuple[str, Callable[..., Any]]] = {
    "GPTJAttention": ("_attn", _of_gptj),
    "BloomAttention": ("forward", _of_bloom),
    "FalconAttention": ("forward", _of_falcon),
}
