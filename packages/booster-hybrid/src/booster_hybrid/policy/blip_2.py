"""BLIP-2: a vision encoder, a Q-Former, and a language model, which has a policy of its own."""

from booster_hybrid.policy.base import ModuleRule, Style

PARTS = ("language_model",)
LAYERS = ("vision_model.encoder.layers", "qformer.encoder.layer")
WHOLE = ("qformer.encoder.layer",)
"""A few queries, before which its layers may have text that they treat otherwise."""
_HEADS = "num_attention_heads"
_VISION = "vision_model.encoder.layers.*"
_QUERIES = "qformer.encoder.layer.*"
RULES = (
    # The vision encoder divides a whole width by its number of heads.
    ModuleRule(
        f"{_VISION}.self_attn.qkv", Style.COLUMN, _HEADS, num_blocks=3, dividing=("num_heads",), is_optional=True
    ),
    ModuleRule(f"{_VISION}.self_attn.projection", Style.ROW, _HEADS, is_optional=True),
    ModuleRule(f"{_VISION}.mlp.fc1", Style.COLUMN, is_optional=True),
    ModuleRule(f"{_VISION}.mlp.fc2", Style.ROW, is_optional=True),
    *(
        ModuleRule(
            f"{_QUERIES}.{kind}.attention.{name}",
            Style.COLUMN,
            _HEADS,
            scaled=("num_attention_heads", "all_head_size"),
            shares_input=not (kind == "crossattention" and name == "query"),  # keys and values read the image
            is_optional=True,
        )
        for kind in ("attention", "crossattention")
        for name in ("query", "key", "value")
    ),
    *(
        ModuleRule(f"{_QUERIES}.{kind}.output.dense", Style.ROW, _HEADS, is_optional=True)
        for kind in ("attention", "crossattention")
    ),
    *(
        ModuleRule(f"{_QUERIES}.{name}.dense", style, is_optional=True)
        for name, style in (
            ("intermediate", Style.COLUMN),
            ("intermediate_query", Style.COLUMN),
            ("output", Style.ROW),
            ("output_query", Style.ROW),
        )
    ),
)
