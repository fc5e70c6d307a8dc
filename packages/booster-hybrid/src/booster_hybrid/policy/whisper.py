"""Whisper: an encoder and a decoder, whose numbers of heads may differ."""

from booster_hybrid.policy.base import ModuleRule, Style

LAYERS = ("model.encoder.layers", "model.decoder.layers", "encoder.layers", "decoder.layers")
RULES = (
    *(
        ModuleRule(
            f"**.{kind}.{name}",
            style,
            "num_heads",
            scaled=("num_heads",),
            shares_input=not (kind == "encoder_attn" and name == "q_proj"),  # keys and values read the encoder
            is_optional=True,
        )
        for kind in ("self_attn", "encoder_attn")
        for name, style in (
            ("q_proj", Style.COLUMN),
            ("k_proj", Style.COLUMN),
            ("v_proj", Style.COLUMN),
            ("out_proj", Style.ROW),
        )
    ),
    ModuleRule("**.fc1", Style.COLUMN),
    ModuleRule("**.fc2", Style.ROW),
)
