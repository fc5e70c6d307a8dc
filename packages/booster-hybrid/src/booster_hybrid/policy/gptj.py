"""GPT-J: attention and MLP read the same normalised input."""

from booster_hybrid.policy.base import ModuleRule, Style

LAYERS = ("transformer.h", "h")
RULES = (
    *(
        ModuleRule(f"**.attn.{name}", Style.COLUMN, "num_attention_heads", scaled=("num_attention_heads",))
        for name in ("q_proj", "k_proj", "v_proj")
    ),
    ModuleRule("**.attn.out_proj", Style.ROW, "num_attention_heads"),
    ModuleRule("**.mlp.fc_in", Style.COLUMN),
    ModuleRule("**.mlp.fc_out", Style.ROW),
)
