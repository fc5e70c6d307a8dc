"""Policies of families of transformers' models that carry no tensor plan, by ``model_type``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from booster_hybrid.policy.base import ModuleRule, Style

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
"""Plans of families that carry none, whose layers have what others have besides parts that mix positions by heads."""

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
