"""Which policy a model has, for layers and for experts.

It is the user's own, a third party's, one of ours for its family, or transformers' plan, in this order. A plan maps
name patterns to styles. What it leaves out is added: which dimension counts heads, so that these stay whole, and the
embedding, which is split by vocabulary as the head is. Families that carry no plan have policies of ours, by
``model_type``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from booster_core.errors import ConfigError
from booster_core.state import NamedTensors, named_modules
from booster_hybrid.modules import inner_model
from booster_hybrid.policy.base import WHOLE_SEQUENCES, ExpertRule, ModuleRule, ShardingPolicy, Style, matches
from booster_hybrid.policy.mixers import rules_of_mixers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


@dataclass(frozen=True)
class Family:
    """How the models of a family are split.

    Args:
        layers: Names of their lists of layers; a model has some of them.
        rules: The rules, or what makes them of a model's configuration.
        whole: Those lists whose sequences are not to be split.
        parts: Modules inside that are models with a policy of their own.
    """

    layers: tuple[str, ...]
    rules: tuple[ModuleRule, ...] | Callable[[Any], tuple[ModuleRule, ...]]
    whole: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()


def _attention(
    prefix: str, columns: Iterable[str], row: str, units: str = "num_attention_heads", **options: Any
) -> tuple[ModuleRule, ...]:
    """Return rules of an attention: options are those of its column-parallel layers."""
    is_optional = options.get("is_optional", False)
    return (
        *(ModuleRule(f"{prefix}.{name}", Style.COLUMN, units, **options) for name in columns),
        ModuleRule(f"{prefix}.{row}", Style.ROW, units, is_optional=is_optional),
    )


def _mlp(prefix: str, up: str, down: str, *, is_optional: bool = False) -> tuple[ModuleRule, ...]:
    return (
        ModuleRule(f"{prefix}.{up}", Style.COLUMN, is_optional=is_optional),
        ModuleRule(f"{prefix}.{down}", Style.ROW, is_optional=is_optional),
    )


def _across(prefix: str, query: str, others: Iterable[str], row: str, units: str, **options: Any) -> list[ModuleRule]:
    """Return rules of an attention whose keys and values read another sequence than its queries."""
    return [
        ModuleRule(f"{prefix}.{query}", Style.COLUMN, units, shares_input=False, **options),
        *(ModuleRule(f"{prefix}.{name}", Style.COLUMN, units, **options) for name in others),
        ModuleRule(f"{prefix}.{row}", Style.ROW, units, **options),
    ]


_QKV = ("q_proj", "k_proj", "v_proj")
_BERT_SCALED = ("num_attention_heads", "all_head_size")


def _blip_2() -> tuple[ModuleRule, ...]:
    vision, queries = "vision_model.encoder.layers.*", "qformer.encoder.layer.*"
    heads, names = "num_attention_heads", ("query", "key", "value")
    options: dict[str, Any] = {"scaled": _BERT_SCALED, "is_optional": True}
    # The vision encoder divides the width of its input by its number of heads.
    return (
        *_attention(
            f"{vision}.self_attn",
            ["qkv"],
            "projection",
            num_blocks=3,
            scaled=("num_heads",),
            local_width=True,
            is_optional=True,
        ),
        *_mlp(f"{vision}.mlp", "fc1", "fc2", is_optional=True),
        *(ModuleRule(f"{queries}.attention.attention.{name}", Style.COLUMN, heads, **options) for name in names),
        ModuleRule(
            f"{queries}.crossattention.attention.query", Style.COLUMN, heads, shares_input=False, **options
        ),  # keys and values read the image
        *(
            ModuleRule(f"{queries}.crossattention.attention.{name}", Style.COLUMN, heads, **options)
            for name in names[1:]
        ),
        *(
            ModuleRule(f"{queries}.{kind}.output.dense", Style.ROW, heads, is_optional=True)
            for kind in ("attention", "crossattention")
        ),
        *_mlp(queries, "intermediate.dense", "output.dense", is_optional=True),
        *_mlp(queries, "intermediate_query.dense", "output_query.dense", is_optional=True),
    )


def _falcon(config: Any) -> tuple[ModuleRule, ...]:
    """Return the rules of one of three forms: keys and values for each query, for each group of them, or for all."""
    heads, attention = "num_attention_heads", "**.self_attention"
    qkv = f"{attention}.query_key_value"
    groups: str | int = heads
    if config.new_decoder_architecture:  # each group's queries, then its key and value
        groups = "num_kv_heads"
        fused = ModuleRule(qkv, Style.COLUMN, groups, scaled=("num_heads", "num_kv_heads"))
    elif config.multi_query:
        groups = 1
        fused = ModuleRule(qkv, Style.COLUMN, groups=1, blocks=(heads, 1, 1), scaled=("num_heads",))
    else:  # each head's query, key and value
        fused = ModuleRule(qkv, Style.COLUMN, heads, scaled=("num_heads", "num_kv_heads"))
    return (
        ModuleRule(
            "**.h.*.self_attention", Style.ARGUMENT, heads, groups=groups, arguments=("alibi", "attention_mask")
        ),
        fused,
        ModuleRule(f"{attention}.dense", Style.ROW, heads, groups=groups),
        *_mlp("**.mlp", "dense_h_to_4h", "dense_4h_to_h"),
    )


def _sam() -> tuple[ModuleRule, ...]:
    """Return the rules of the vision encoder's blocks and of the mask decoder's attention."""
    encoder = "vision_encoder.layers.*.attn"
    qkv, projection = _attention(encoder, ["qkv"], "proj", num_blocks=3, scaled=("num_attention_heads",))
    decoder = ("self_attn", "cross_attn_token_to_image", "cross_attn_image_to_token", "final_attn_token_to_image")
    scaled = ("num_attention_heads", "internal_dim")
    return (
        qkv,
        ModuleRule(f"{encoder}.rel_pos_h", Style.SUMMED_GRADIENT, is_optional=True),
        ModuleRule(f"{encoder}.rel_pos_w", Style.SUMMED_GRADIENT, is_optional=True),
        projection,
        *(
            ModuleRule(f"**.{kind}.{name}", style, "num_attention_heads", scaled=scaled)
            for kind in decoder
            for name, style in (*((each, Style.COLUMN) for each in _QKV), ("out_proj", Style.ROW))
        ),
        *_mlp("**.mlp", "lin1", "lin2"),
    )


def _t5() -> tuple[ModuleRule, ...]:
    """Return rules under which the position bias has one column for each head; layers after the first reuse it."""
    options: dict[str, Any] = {"scaled": ("n_heads", "inner_dim")}
    return (
        *(
            ModuleRule(f"**.SelfAttention.{name}", style, "num_heads", **options)
            for name, style in (*((each, Style.COLUMN) for each in "qkv"), ("o", Style.ROW))
        ),
        *_across("**.EncDecAttention", "q", "kv", "o", "num_heads", is_optional=True, **options),
        ModuleRule("**.relative_attention_bias.weight", Style.PARAMETER, "num_heads", dim=1),
        *(ModuleRule(f"**.DenseReluDense.{name}", Style.COLUMN, is_optional=True) for name in ("wi", "wi_0", "wi_1")),
        ModuleRule("**.DenseReluDense.wo", Style.ROW),
    )


def _whisper() -> tuple[ModuleRule, ...]:
    """Return rules of an encoder and a decoder, whose numbers of heads may differ."""
    options: dict[str, Any] = {"scaled": ("num_heads",), "is_optional": True}
    return (
        *(
            ModuleRule(f"**.self_attn.{name}", style, "num_heads", **options)
            for name, style in (*((each, Style.COLUMN) for each in _QKV), ("out_proj", Style.ROW))
        ),
        *_across("**.encoder_attn", _QKV[0], _QKV[1:], "out_proj", "num_heads", **options),
        *_mlp("**", "fc1", "fc2"),
    )


def _plan(projection: str, norms: Iterable[str], *gate_up_down: str) -> dict[str, str]:
    """Return the plan of layers with the attention of llama, in the form of transformers."""
    *ups, down = gate_up_down
    return {
        **{f"layers.*.self_attn.{name}": "colwise" for name in _QKV},
        f"layers.*.self_attn.{projection}": "rowwise",
        **{f"layers.*.self_attn.{name}": "replicated_with_grad_allreduce" for name in norms},
        **{f"layers.*.feed_forward.{name}": "colwise" for name in ups},
        f"layers.*.feed_forward.{down}": "rowwise",
    }


PLANS: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("bamba", "falcon_h1"), _plan("o_proj", (), "gate_proj", "up_proj", "down_proj")),
    "lfm2": _plan("out_proj", ("q_layernorm", "k_layernorm"), "w1", "w3", "w2"),
    "lfm3": {
        **_plan("o_proj", ("q_norm", "k_norm"), "w1", "w3", "w2"),
        "layers.*.self_attn.g_proj": "colwise",  # a gate for each head
    },
}
"""Plans of families that carry none, whose layers are as others are but for parts that mix positions by heads."""

_HIDDEN_LAYERS = ("transformer.h", "h")
FAMILIES: Mapping[str, Family] = {
    # The attention's output projection belongs to another module than q, k and v.
    "bert": Family(
        ("bert.encoder.layer", "encoder.layer"),
        (
            ModuleRule("**.self.query", Style.COLUMN, "num_attention_heads", scaled=_BERT_SCALED),
            *(ModuleRule(f"**.self.{name}", Style.COLUMN, "num_attention_heads") for name in ("key", "value")),
            ModuleRule("**.attention.output.dense", Style.ROW, "num_attention_heads"),
            ModuleRule("**.intermediate.dense", Style.COLUMN),
            ModuleRule("**.layer.*.output.dense", Style.ROW),
        ),
    ),
    # A vision encoder, a Q-Former, and a language model. The Q-Former has a few queries, before which its layers may
    # have text that they treat otherwise.
    "blip_2": Family(
        ("vision_model.encoder.layers", "qformer.encoder.layer"),
        _blip_2(),
        whole=("qformer.encoder.layer",),
        parts=("language_model",),
    ),
    # q, k and v of each head are adjacent, and position biases (ALiBi) are made for all heads at once.
    "bloom": Family(
        _HIDDEN_LAYERS,
        (
            ModuleRule("**.h.*.self_attention", Style.ARGUMENT, "n_head", arguments=("alibi",)),
            *_attention("**.self_attention", ["query_key_value"], "dense", "n_head", scaled=("num_heads",)),
            *_mlp("**.mlp", "dense_h_to_4h", "dense_4h_to_h"),
        ),
    ),
    "falcon": Family(_HIDDEN_LAYERS, _falcon),
    # q, k and v in one ``Conv1D``, whose weight is (inputs, outputs).
    "gpt2": Family(
        _HIDDEN_LAYERS,
        (
            *_attention("**.attn", ["c_attn"], "c_proj", num_blocks=3, scaled=("num_heads", "split_size")),
            *_mlp("**.mlp", "c_fc", "c_proj"),
        ),
    ),
    # Attention and MLP read the same normalised input.
    "gptj": Family(
        _HIDDEN_LAYERS,
        (
            *_attention("**.attn", _QKV, "out_proj", scaled=("num_attention_heads",)),
            *_mlp("**.mlp", "fc_in", "fc_out"),
        ),
    ),
    "opt": Family(
        ("model.decoder.layers", "decoder.layers"),
        (*_attention("**.self_attn", _QKV, "out_proj", scaled=("num_heads", "embed_dim")), *_mlp("**", "fc1", "fc2")),
    ),
    # Positions of the vision encoder form a plane and are cut into windows, which is not how sequences are split.
    "sam": Family(("vision_encoder.layers",), _sam(), whole=("vision_encoder.layers",)),
    "t5": Family(("encoder.block", "decoder.block", "transformer.encoder.block", "transformer.decoder.block"), _t5()),
    "vit": Family(
        ("vit.layers", "layers"), (*_attention("**.attention", _QKV, "o_proj"), *_mlp("**.mlp", "fc1", "fc2"))
    ),
    "whisper": Family(("model.encoder.layers", "model.decoder.layers", "encoder.layers", "decoder.layers"), _whisper()),
}


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
    plan = {**(plan or {}), **PLANS.get(getattr(config, "model_type", ""), {})}
    mixers = rules_of_mixers(model)
    if not mixers and not any("layers" in pattern or "." in pattern for pattern in plan):
        return None
    has_groups = bool(getattr(config, "num_key_value_heads", None))
    parameters = NamedTensors.of(model).paths
    rules = [*vocabulary_rules(model), *mixers, *_LEFT_OUT.get(getattr(config, "model_type", ""), ())]
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
