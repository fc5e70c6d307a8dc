"""OPT, and Whisper, whose attention is named alike."""

from booster_hybrid.policy.base import ModuleRule, Style

LAYERS = ("model.decoder.layers", "decoder.layers")
RULES = (
    *(
        ModuleRule(f"**.self_attn.{name}", Style.COLUMN, "num_attention_heads", scaled=("num_heads", "embed_dim"))
        for name in ("q_proj", "k_proj", "v_proj")
    ),
    ModuleRule("**.self_attn.out_proj", Style.ROW, "num_attention_heads"),
    ModuleRule("**.fc1", Style.COLUMN),
    ModuleRule("**.fc2", Style.ROW),
)
