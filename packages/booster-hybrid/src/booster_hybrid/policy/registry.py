"""Which policy a model has: the user's own, a third party's, transformers' plan, or one of ours, in this order.

Families without a plan have a small module here, named after transformers' ``model_type`` and imported when asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from booster_core.errors import ConfigError
from booster_hybrid.policy.base import ShardingPolicy
from booster_hybrid.policy.from_transformers import read_plan, vocabulary_rules

if TYPE_CHECKING:
    from torch import nn

FAMILIES = ("bert", "gpt2", "gptj", "opt", "sam", "t5", "vit", "whisper")


def policy_for(model: nn.Module, custom_policy: ShardingPolicy | None = None, hooks: Any = None) -> ShardingPolicy:
    """Return how a model is to be split.

    Args:
        model: The user's model.
        custom_policy: The user's own policy, which wins.
        hooks: The hook relay of `booster_core.hookspecs`, asked for a third party's policy.

    Raises:
        ConfigError: If there is none.
    """
    if custom_policy is not None:
        return custom_policy
    if hooks is not None:
        found = hooks.sharding_policy(model_class=type(model))
        if isinstance(found, ShardingPolicy):
            return found
    own = _own(model)
    if own is None:
        own = read_plan(model)
    if own is not None:
        return own
    msg = (
        f"There is no sharding policy for {type(model).__name__}. Pass `custom_policy=ShardingPolicy(rules=[ModuleRule("
        "'blocks.*.up', Style.COLUMN), ModuleRule('blocks.*.down', Style.ROW)], layers=['blocks'])`, or register one "
        "through the hook `sharding_policy`."
    )
    raise ConfigError(msg)


def _own(model: nn.Module) -> ShardingPolicy | None:
    family = getattr(getattr(model, "config", None), "model_type", None)
    if family not in FAMILIES:
        return None
    module = importlib.import_module(f"booster_hybrid.policy.{family}")
    return ShardingPolicy(rules=(*vocabulary_rules(model, module.HEAD), *module.RULES), layers=module.LAYERS)
