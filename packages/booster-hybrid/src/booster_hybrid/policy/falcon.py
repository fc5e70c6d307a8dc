"""Falcon in its three forms: queries with keys and values of their own, of their group, or with one key and value."""

from __future__ import annotations

from typing import Any

from booster_hybrid.policy.base import ModuleRule, Style

LAYERS = ("transformer.h", "h")
_HEADS = "num_attention_heads"
_ATTENTION = "**.self_attention"


def make_rules(config: Any) -> tuple[ModuleRule, ...]:
    """Return the rules for a configuration, which decides on the form.

    Args:
        config: The model's ``FalconConfig``.
    """
    qkv = f"{_ATTENTION}.query_key_value"
    groups: str | int = _HEADS
    if config.new_decoder_architecture:  # each group's queries, then its key and value
        groups = "num_kv_heads"
        fused = ModuleRule(qkv, Style.COLUMN, groups, scaled=("num_heads", "num_kv_heads"))
    elif config.multi_query:
        groups = 1
        fused = ModuleRule(qkv, Style.COLUMN, groups=1, blocks=(_HEADS, 1, 1), scaled=("num_heads",))
    else:  # each head's query, key and value
        fused = ModuleRule(qkv, Style.COLUMN, _HEADS, scaled=("num_heads", "num_kv_heads"))
    return (
        ModuleRule(
            "**.h.*.self_attention", Style.ARGUMENT, _HEADS, groups=groups, arguments=("alibi", "attention_mask")
        ),
        fused,
        ModuleRule(f"{_ATTENTION}.dense", Style.ROW, _HEADS, groups=groups),
        ModuleRule("**.mlp.dense_h_to_4h", Style.COLUMN),
        ModuleRule("**.mlp.dense_4h_to_h", Style.ROW),
    )
