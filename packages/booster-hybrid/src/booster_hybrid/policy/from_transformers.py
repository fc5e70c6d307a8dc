"""Policies read from the tensor plans that transformers' models carry.

A plan maps name patterns to styles. What it leaves out is added: which dimension counts heads, so that these stay
whole, and the embedding, which is split by vocabulary as the head is.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from booster_core.errors import ConfigError
from booster_core.state import NamedTensors, named_modules
from booster_hybrid.policy.base import ModuleRule, ShardingPolicy, Style, matches

_STYLES = {
    "colwise": Style.COLUMN,
    "rowwise": Style.ROW,
    "colwise_gather_output": Style.COLUMN_GATHER,
    "rowwise_split_input": Style.ROW_SPLIT,
    "replicated_with_grad_allreduce": Style.SUMMED_GRADIENT,
    "packed_colwise": Style.PARAMETER,
    "moe_tp_experts": Style.EXPERTS,
    "embedding_rowwise": Style.VOCABULARY,
    "packed_rowwise": Style.ROW,
    "mla_kv_a_proj": Style.SUMMED_FEATURES,
}
_NO_EFFECT = ("local_params", "replicate")
"""Styles of what needs nothing here, where weights are plain tensors."""
_LEFT_OUT: dict[str, tuple[ModuleRule, ...]] = {
    "apertus": (ModuleRule("**.mlp.act_fn", Style.SUMMED_GRADIENT),),  # learns its slopes
    "qwen3_vl_moe": tuple(ModuleRule(f"**.self_attn.{norm}", Style.SUMMED_GRADIENT) for norm in ("q_norm", "k_norm")),
}
"""Rules that the plan of a family lacks."""
_SAME_LAYERS = {"qwen3_vl": "qwen3"}
"""Families without a plan whose language model has the layers of another family."""
_ATTENTION = ("attn", "attention")
_KEYS_AND_VALUES = ("k_proj", "v_proj")


def read_plan(model: nn.Module) -> ShardingPolicy | None:
    """Return the policy of a transformers model that carries a tensor plan, else ``None``.

    Args:
        model: The user's model.

    Raises:
        ConfigError: If the plan has a style that is not known here.
    """
    plan: dict[str, str] | None = getattr(model, "_tp_plan", None) or getattr(model, "tp_plan", None)
    config: Any = getattr(model, "config", None)
    if (family := _SAME_LAYERS.get(getattr(config, "model_type", ""))) is not None:
        plan = {**(plan or {}), **_plan_of_layers(model, family)}
    if not plan or not any("layers" in pattern or "." in pattern for pattern in plan):
        return None
    has_groups = bool(getattr(config, "num_key_value_heads", None))
    parameters = NamedTensors.of(model).paths
    rules = [*vocabulary_rules(model), *_LEFT_OUT.get(getattr(config, "model_type", ""), ())]
    for pattern, text in plan.items():
        if text in _NO_EFFECT:
            continue
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
        dim = -1 if style is Style.ROW else -2
        counts: dict[str, Any] = {}
        if in_attention and style in (Style.COLUMN, Style.ROW):
            counts = _heads(pattern.rpartition(".")[2], has_groups=has_groups)
        elif style is Style.SUMMED_FEATURES:
            counts = {"units": "qk_rope_head_dim"}
        if is_parameter and style in (Style.COLUMN, Style.ROW):  # (experts, outputs, inputs), or one for each head
            style = Style.PARAMETER
        rules.append(
            ModuleRule(
                pattern,
                style,
                **counts,
                num_blocks=2 if text.startswith("packed") else 1,
                is_optional=True,  # one plan serves all heads and depths of a family
                dim=dim,
            )
        )
    return ShardingPolicy(rules=tuple(rules), layers=layer_lists(model))


def _heads(name: str, *, has_groups: bool) -> dict[str, Any]:
    """Return the fields of a rule for a layer or parameter that has a part for each head."""
    is_shared = has_groups and name in _KEYS_AND_VALUES
    return {
        "units": "num_key_value_heads" if is_shared else "num_attention_heads",
        "groups": "num_key_value_heads" if has_groups else None,
        "is_shared": is_shared,
        "per_group": () if is_shared or not has_groups else ("num_key_value_groups",),
    }


def vocabulary_rules(model: nn.Module) -> list[ModuleRule]:
    """Return rules that split a transformers model's embedding and head by vocabulary.

    Args:
        model: The user's model; one without embedding or head has no rule for it.
    """
    rules: list[ModuleRule] = []
    names: dict[int, str] = {}
    inner: dict[str, nn.Module] = {}  # adapters may be around the others
    for name, _, module in named_modules(model):
        names.setdefault(id(module), name)
        inner[name] = module
    for getter, kind, style in (
        ("get_input_embeddings", nn.Embedding, Style.VOCABULARY),
        ("get_output_embeddings", nn.Linear, Style.HEAD),
    ):
        try:
            found = getattr(model, getter)() if hasattr(model, getter) else None
        except NotImplementedError:  # what transformers' models without tokens say
            found = None
        found = inner[names[id(found)]] if id(found) in names else None
        if isinstance(found, kind):
            # Encoder and decoder may have modules of their own around one table.
            rules += [
                ModuleRule(name, style)
                for name, module in inner.items()
                if isinstance(module, kind) and module.weight is found.weight and names[id(module)] == name
            ]
    return rules


def layer_lists(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the lists that transformers' plans call layers.

    Of a model that reads images or sounds, these are its language model's: towers stay whole.

    Args:
        model: The user's model.
    """
    language = language_model(model)
    return tuple(
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and name.rpartition(".")[2] == "layers"
        and (language is None or name.startswith(f"{language}."))
    )


def language_model(model: nn.Module) -> str | None:
    """Return the name of the language model in one of transformers that reads images or sounds as well.

    Args:
        model: The user's model; for others, ``None``.
    """
    config: Any = getattr(model, "config", None)
    text = getattr(config, "get_text_config", lambda **_: config)(decoder=True)
    if text is config or getattr(config, "is_encoder_decoder", False) or not hasattr(model, "get_decoder"):
        return None
    get_decoder: Any = model.get_decoder
    decoder = get_decoder()
    return next((name for name, module in model.named_modules() if module is decoder and name), None)


def _plan_of_layers(model: nn.Module, family: str) -> dict[str, str]:
    """Return the plan of a family's layers for the language model in a model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind: Any = CONFIG_MAPPING[family]
    plan: dict[str, str] = kind.base_model_tp_plan
    return {f"{language_model(model)}.{pattern}": text for pattern, text in plan.items()}
