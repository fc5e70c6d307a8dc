"""Which policy a model has, for layers and for experts.

It is the user's own, a third party's, one of ours for its family, or transformers' plan, in this order.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from torch import nn

from booster_core.errors import ConfigError
from booster_hybrid.inner_model import inner_model
from booster_hybrid.policy.base import WHOLE_SEQUENCES, ExpertRule, ModuleRule, ShardingPolicy
from booster_hybrid.policy.families import FAMILIES
from booster_hybrid.policy.from_transformers import read_plan, vocabulary_rules

_SHOWN = 12
_OF_EXPERTS = "grouped_gemm"
"""What plans say of a parameter with a part for each expert."""
_LLAMA_4 = ("llama4", "llama4_text")
"""Families without a plan, whose experts are called with every token."""


def policy_for(model: nn.Module, custom_policy: ShardingPolicy | None = None, hooks: Any = None) -> ShardingPolicy:
    """Return how a model is split.

    Args:
        model: The user's model.
        custom_policy: The user's own policy, which wins.
        hooks: The hook relay of `booster_core.plugin.hookspecs`, asked for a third party's policy.

    Raises:
        ConfigError: If there is none.
    """
    given = given_policy(model, custom_policy, hooks)
    if given is not None and (given.rules or given.layers or not given.experts):
        return given  # one that names experts alone leaves the rest as it is
    model = inner_model(model)
    own = _own(model)
    if own is None:
        own = read_plan(model)
    if own is not None:
        return own
    msg = (
        f"There is no sharding policy for {type(model).__name__}. Pass `custom_policy=ShardingPolicy(rules=(ModuleRule("
        "'blocks.*.up', Style.COLUMN), ModuleRule('blocks.*.down', Style.ROW)), layers=('blocks',))` with the names of "
        f"its own modules ({_layer_names(model)}), or register one through the hook `sharding_policy`; "
        "docs/sharding-policies.md has a whole example."
    )
    raise ConfigError(msg)


def given_policy(
    model: nn.Module, custom_policy: ShardingPolicy | None = None, hooks: Any = None
) -> ShardingPolicy | None:
    """Return a policy that the user or a third party wrote for a model; ``None`` where there is none.

    Args:
        model: The user's model.
        custom_policy: The user's own policy, which wins.
        hooks: As for `policy_for`.
    """
    if custom_policy is not None or hooks is None:
        return custom_policy
    found = hooks.sharding_policy(model_class=type(inner_model(model)))
    return found if isinstance(found, ShardingPolicy) else None


def known_layers(
    model: nn.Module, custom_policy: ShardingPolicy | None = None, hooks: Any = None
) -> ShardingPolicy | None:
    """Return a policy that lists a model's layers: the user's, a third party's, or one of ours; ``None`` without one.

    Args:
        model: The user's model.
        custom_policy: The user's own policy, which wins.
        hooks: As for `policy_for`.
    """
    given = given_policy(model, custom_policy, hooks)
    if given is not None and given.layers:
        return given
    return _own(inner_model(model))


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


def _layer_names(model: nn.Module) -> str:
    """Return what the linear layers of a model are called, one for each name but for numbers."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    patterns = dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names)
    listed = [f"'{pattern}'" for pattern in patterns]
    shown = listed[:_SHOWN] + ([f"and {len(listed) - _SHOWN} more"] if len(listed) > _SHOWN else [])
    return "linear layers: " + ", ".join(shown) if listed else "it has no nn.Linear"


def _own(model: nn.Module) -> ShardingPolicy | None:
    """Return our policy of a model's family; ``None`` for others."""
    family = FAMILIES.get(str(getattr(getattr(model, "config", None), "model_type", None)).replace("-", "_"))
    if family is None:
        return None
    rules = family.rules(model.config) if callable(family.rules) else family.rules
    layers, whole = family.layers, family.whole
    parts = [(name, model.get_submodule(name)) for name in family.parts if hasattr(model, name)]
    if not parts:
        return ShardingPolicy((*vocabulary_rules(model), *rules), layers, {WHOLE_SEQUENCES: whole})
    for name, part in parts:
        inner = policy_for(part)
        rules += tuple(rule for each in inner.rules for rule in _inside(name, part, each))
        layers += tuple(f"{name}.{each}" for each in inner.layers)
        whole += tuple(f"{name}.{each}" for each in inner.whole_sequences)
    return ShardingPolicy(rules, layers, {WHOLE_SEQUENCES: whole})


def _inside(name: str, part: nn.Module, rule: ModuleRule) -> list[ModuleRule]:
    """Return a rule of a part of a model as rules of the model: as seen from the part, or from its base model."""
    prefixes = (name, f"{name}.{base}") if (base := getattr(part, "base_model_prefix", "")) else (name,)
    if rule.pattern.startswith("**."):
        prefixes = (name,)
    is_optional = rule.is_optional or len(prefixes) > 1
    return [replace(rule, pattern=f"{prefix}.{rule.pattern}", is_optional=is_optional) for prefix in prefixes]
