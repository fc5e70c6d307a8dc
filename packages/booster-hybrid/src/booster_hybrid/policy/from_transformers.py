"""Policies read from the tensor plans that transformers' models carry.

A plan maps name patterns to styles. What it leaves out is added: which dimension counts heads, so that these stay
whole, and the embedding, which is split by vocabulary as the head is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from booster_core.errors import ConfigError
from booster_hybrid.policy.base import ModuleRule, ShardingPolicy, Style

if TYPE_CHECKING:
    from torch import nn

_STYLES = {
    "colwise": Style.COLUMN,
    "rowwise": Style.ROW,
    "colwise_gather_output": Style.COLUMN_GATHER,
    "rowwise_split_input": Style.ROW_SPLIT,
    "replicated_with_grad_allreduce": Style.SUMMED_GRADIENT,
    "packed_colwise": Style.COLUMN_PARAMETER,
    "moe_tp_experts": Style.EXPERTS,
    "embedding_rowwise": Style.VOCABULARY,
}
_ATTENTION = ("attn", "attention")


def read_plan(model: nn.Module) -> ShardingPolicy | None:
    """Return the policy of a transformers model that carries a tensor plan, else ``None``.

    Args:
        model: The user's model.

    Raises:
        ConfigError: If the plan has a style that is not known here.
    """
    plan: dict[str, str] | None = getattr(model, "_tp_plan", None) or getattr(model, "tp_plan", None)
    if not plan or not any("layers" in pattern or "." in pattern for pattern in plan):
        return None
    config: Any = getattr(model, "config", None)
    heads = "num_key_value_heads" if getattr(config, "num_key_value_heads", None) else "num_attention_heads"
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    names = {id(module): name for name, module in model.named_modules()}
    parameters = {name for name, _ in model.named_parameters()}
    rules = []
    if embedding is not None:
        rules.append(ModuleRule(names[id(embedding)], Style.VOCABULARY))
    if head is not None:
        rules.append(ModuleRule(names[id(head)], Style.HEAD))
    for pattern, text in plan.items():
        if text not in _STYLES:
            known = ", ".join(map(repr, _STYLES))
            msg = (
                f"The tensor plan of {type(model).__name__} says {text!r} of '{pattern}', which is none of {known}. "
                "Pass `custom_policy=` with rules of your own."
            )
            raise ConfigError(msg)
        style = _STYLES[text]
        in_attention = any(word in part for part in pattern.split(".")[-2:-1] for word in _ATTENTION)
        is_parameter = any(matches(pattern, name) for name in parameters)
        if is_parameter and style in (Style.COLUMN, Style.ROW):
            style = Style.COLUMN_PARAMETER if style is Style.COLUMN else Style.ROW_PARAMETER
        rules.append(
            ModuleRule(
                pattern,
                style,
                units=heads if in_attention and style is not Style.SUMMED_GRADIENT else None,
                num_blocks=2 if text == "packed_colwise" else 1,
                is_optional=True,  # one plan serves all heads and depths of a family
            )
        )
    return ShardingPolicy(rules=tuple(rules), layers=_layer_lists(model))


def matches(pattern: str, name: str) -> bool:
    """Return whether a dotted name fits a pattern, in which ``*`` stands for one component.

    Args:
        pattern: Such as ``"layers.*.mlp"``.
        name: Such as ``"layers.3.mlp"``.
    """
    ours, theirs = pattern.split("."), name.split(".")
    return len(ours) == len(theirs) and all(one in ("*", other) for one, other in zip(ours, theirs, strict=True))


def _layer_lists(model: nn.Module) -> tuple[str, ...]:
    from torch import nn

    return tuple(
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] == "layers"
    )
