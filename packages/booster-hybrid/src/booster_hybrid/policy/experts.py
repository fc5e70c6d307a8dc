"""Which modules of a model are experts: by the user's policy, a third party's, or the plan of transformers' models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from booster_hybrid.inner_model import inner_model
from booster_hybrid.policy.base import ExpertRule
from booster_hybrid.policy.registry import given_policy

if TYPE_CHECKING:
    from torch import nn

    from booster_hybrid.policy.base import ShardingPolicy

_OF_EXPERTS = "grouped_gemm"
"""What plans say of a parameter with a part for each expert."""
_LLAMA_4 = ("llama4", "llama4_text")
"""Families without a plan, whose experts are called with every token."""


def expert_rules(model: nn.Module, custom_policy: ShardingPolicy | None = None, hooks: Any = None) -> list[ExpertRule]:
    """Return the rules for a model's experts; none where no module is known.

    Args:
        model: The user's model.
        custom_policy: The user's own policy, whose rules win.
        hooks: The hook relay, asked for a third party's policy.
    """
    given = given_policy(model, custom_policy, hooks)
    if given is not None and given.experts:
        return list(given.experts)
    model = inner_model(model)
    config: Any = getattr(model, "config", None)
    plan = getattr(model, "_ep_plan", None) or getattr(config, "base_model_ep_plan", None) or {}
    parameters: dict[str, list[str]] = {}
    for pattern, text in plan.items():
        if text == _OF_EXPERTS:
            module, _, parameter = pattern.rpartition(".")
            parameters.setdefault(module, []).append(parameter)
    if getattr(config, "model_type", None) in _LLAMA_4:
        return [ExpertRule("**.feed_forward.experts", ("gate_up_proj", "down_proj"), takes_every_token=True)]
    return [ExpertRule(pattern, parameters=tuple(names)) for pattern, names in parameters.items()]
