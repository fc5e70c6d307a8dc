"""T5: the relative position bias has one column for each head; layers after the first reuse it."""

from booster_hybrid.policy.base import ModuleRule, Style

LAYERS = ("encoder.block", "decoder.block", "transformer.encoder.block", "transformer.decoder.block")
_SCALED = ("n_heads", "inner_dim")
RULES = (
    *(
        ModuleRule(
            f"**.{kind}.{name}",
            style,
            "num_heads",
            scaled=_SCALED,
            shares_input=not (kind == "EncDecAttention" and name == "q"),  # keys and values read the encoder
            is_optional=kind == "EncDecAttention",
        )
        for kind in ("SelfAttention", "EncDecAttention")
        for name, style in (("q", Style.COLUMN), ("k", Style.COLUMN), ("v", Style.COLUMN), ("o", Style.ROW))
    ),
    ModuleRule("**.relative_attention_bias.weight", Style.PARAMETER, "num_heads", dim=1),
    ModuleRule("**.DenseReluDense.wi", Style.COLUMN, is_optional=True),
    ModuleRule("**.DenseReluDense.wi_0", Style.COLUMN, is_optional=True),
    ModuleRule("**.DenseReluDense.wi_1", Style.COLUMN, is_optional=True),
    ModuleRule("**.DenseReluDense.wo", Style.ROW),
)
