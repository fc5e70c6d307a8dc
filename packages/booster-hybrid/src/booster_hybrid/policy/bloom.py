"""Bloom: q, k and v of each head are adjacent, and position biases (ALiBi) are made for all heads at once."""

from booster_hybrid.policy.base import ModuleRule, Style

LAYERS = ("transformer.h", "h")
_HEADS = "n_head"
RULES = (
    ModuleRule("**.h.*.self_attention", Style.ARGUMENT, _HEADS, arguments=("alibi",)),
    ModuleRule("**.self_attention.query_key_value", Style.COLUMN, _HEADS, scaled=("num_heads",)),
    ModuleRule("**.self_attention.dense", Style.ROW, _HEADS),
    ModuleRule("**.mlp.dense_h_to_4h", Style.COLUMN),
    ModuleRule("**.mlp.dense_4h_to_h", Style.ROW),
)
