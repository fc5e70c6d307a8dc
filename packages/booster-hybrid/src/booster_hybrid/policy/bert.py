"""BERT: the attention's output projection belongs to another module than q, k and v."""

from booster_hybrid.policy.base import ModuleRule, Style

LAYERS = ("bert.encoder.layer", "encoder.layer")
RULES = (
    ModuleRule("**.self.query", Style.COLUMN, "num_attention_heads", scaled=("num_attention_heads", "all_head_size")),
    ModuleRule("**.self.key", Style.COLUMN, "num_attention_heads"),
    ModuleRule("**.self.value", Style.COLUMN, "num_attention_heads"),
    ModuleRule("**.attention.output.dense", Style.ROW, "num_attention_heads"),
    ModuleRule("**.intermediate.dense", Style.COLUMN),
    ModuleRule("**.layer.*.output.dense", Style.ROW),
)
