"""ViT."""

from booster_hybrid.policy.base import ModuleRule, Style

LAYERS = ("vit.layers", "layers")
RULES = (
    *(
        ModuleRule(f"**.attention.{name}", Style.COLUMN, "num_attention_heads")
        for name in ("q_proj", "k_proj", "v_proj")
    ),
    ModuleRule("**.attention.o_proj", Style.ROW, "num_attention_heads"),
    ModuleRule("**.mlp.fc1", Style.COLUMN),
    ModuleRule("**.mlp.fc2", Style.ROW),
)
