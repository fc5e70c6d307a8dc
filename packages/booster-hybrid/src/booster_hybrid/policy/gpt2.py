"""GPT-2: q, k and v in one ``Conv1D``, whose weight is (inputs, outputs)."""

from booster_hybrid.policy.base import ModuleRule, Style

LAYERS = ("transformer.h", "h")
RULES = (
    ModuleRule("**.attn.c_attn", Style.COLUMN, "num_attention_heads", num_blocks=3, scaled=("num_heads", "split_size")),
    ModuleRule("**.attn.c_proj", Style.ROW, "num_attention_heads"),
    ModuleRule("**.mlp.c_fc", Style.COLUMN),
    ModuleRule("**.mlp.c_proj", Style.ROW),
)
