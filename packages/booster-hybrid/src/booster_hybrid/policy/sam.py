"""SAM: the vision encoder's blocks and the mask decoder's attention."""

from booster_hybrid.policy.base import ModuleRule, Style

LAYERS = ("vision_encoder.layers",)
WHOLE = LAYERS
"""Its positions form a plane and are cut into windows, which is not how sequences are split."""
_DECODER = ("self_attn", "cross_attn_token_to_image", "cross_attn_image_to_token", "final_attn_token_to_image")
RULES = (
    ModuleRule(
        "vision_encoder.layers.*.attn.qkv",
        Style.COLUMN,
        "num_attention_heads",
        num_blocks=3,
        scaled=("num_attention_heads",),
    ),
    ModuleRule("vision_encoder.layers.*.attn.rel_pos_h", Style.SUMMED_GRADIENT, is_optional=True),
    ModuleRule("vision_encoder.layers.*.attn.rel_pos_w", Style.SUMMED_GRADIENT, is_optional=True),
    ModuleRule("vision_encoder.layers.*.attn.proj", Style.ROW, "num_attention_heads"),
    *(
        ModuleRule(f"**.{kind}.{name}", style, "num_attention_heads", scaled=("num_attention_heads", "internal_dim"))
        for kind in _DECODER
        for name, style in (
            ("q_proj", Style.COLUMN),
            ("k_proj", Style.COLUMN),
            ("v_proj", Style.COLUMN),
            ("out_proj", Style.ROW),
        )
    ),
    ModuleRule("**.mlp.lin1", Style.COLUMN),
    ModuleRule("**.mlp.lin2", Style.ROW),
)
