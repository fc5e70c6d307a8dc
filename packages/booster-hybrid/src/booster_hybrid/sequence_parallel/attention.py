"""Attention from this rank's positions to those of all ranks, and how models come to it.

Models of transformers are set to `attention` in the registry of such functions; for modules outside of the layers that
are split it attends as one process does. While a layer of a plain PyTorch model runs,
``torch.nn.functional.scaled_dot_product_attention`` does. GPT-J and Bloom attend by code of their own: that method is
replaced on each instance, by one that computes the same through `attention`. So what activation checkpointing computes
again attends likewise.

Relative position biases that a model computes itself, as T5 does, are computed for whole sequences: ring attention
needs the rows of this rank's queries, and the exchange of heads, of all rows, those of this rank's heads.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from booster_core.errors import ConfigError
from booster_hybrid.sequence_parallel.mask import SequenceMask, Visibility, checked, whole_mask
from booster_hybrid.sequence_parallel.ring_attention import AttentionCall, ring_attention
from booster_hybrid.sequence_parallel.stack import OTHER_STATES, argument_names
from booster_hybrid.sequence_parallel.ulysses import all_to_all_attention, head_ranges
from booster_hybrid.torch_functions import outside_of_graphs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from booster_hybrid.sequence_parallel.exchange import SequenceLayout
    from booster_hybrid.sequence_parallel.stack import Stack


@outside_of_graphs
def _biases(module: Any, stack: Stack, *_: Any, **__: Any) -> Tensor:
    """Stand for the ``compute_bias`` of an attention module, whatever lengths the model sees.

    Args:
        module: The module, with ``relative_attention_bias``, a table of shape ``(distances, heads)``.
        stack: The layers that it is in.

    Returns:
        Shape ``(1, heads, local positions, positions)``, or that of whole sequences where heads are exchanged.
    """
    length, device = stack.length, module.relative_attention_bias.weight.device
    compute: Any = type(module).compute_bias
    if stack.mode == "all_to_all":
        return compute(module, length, length, device=device)  # type: ignore[no-any-return]
    rows = [
        compute(module, stop - start, length, device=device, past_seen_tokens=start)
        for start, stop in stack.layout(length).ranges[stack.group.rank]
    ]
    return torch.cat(rows, 2)


def split_relative_biases(layer: nn.Module, stack: Stack) -> None:
    """Let the attention of a layer compute the biases that are needed here, in place.

    Args:
        layer: The layer.
        stack: The layers that it is in.
    """
    for module in layer.modules():
        own: Any = module
        if getattr(module, "has_relative_attention_bias", False) and hasattr(type(module), "compute_bias"):
            own.compute_bias = functools.partial(_biases, module, stack)


def own_bias(bias: Tensor | None, stack: Stack, heads: int, num_here: int, key_length: int) -> Tensor | None:
    """Return the part of a bias that this rank needs.

    Args:
        bias: Made by the layers, or by the model for whole sequences or for all queries alike; ``None`` for none.
        stack: The layers that attend.
        heads: Query heads, before they are exchanged.
        num_here: This rank's queries.
        key_length: Number of all keys.

    Returns:
        ``None`` too where the shape is neither's.
    """
    if bias is None or bias.dim() != 4 or bias.shape[-1] != key_length:
        return None
    if bias.shape[2] == 1:  # the same for all queries
        bias = bias.expand(-1, -1, num_here if stack.mode == "ring_attn" else stack.length, -1)
    rows, columns = bias.shape[2], bias.shape[1]
    if stack.mode == "ring_attn":
        if rows == num_here:
            return bias
        return stack.layout(stack.length).take(bias, 2, stack.group.rank) if rows == stack.length else None
    if rows != stack.length:
        return None
    (first, last), _ = head_ranges(heads, heads, stack.group.size)[stack.group.rank]
    if columns == 1:
        return bias
    return bias[:, first:last] if columns == heads else None


ATTENTION_NAME = "booster_sequence_parallel"
"""What models that are split here have as ``config._attn_implementation``."""
_CONTEXT = "_booster_sequence"
_REFUSED = ("output_attentions", "cache")


class AttentionContext:
    """Where in a split model a module is that may attend, and what its running call is about.

    Layers may be computed again in backward without what is done before them, when other sequences have been underway.

    Args:
        module: The module.
        stack: The layers that it is in; ``None`` outside of such.

    Attributes:
        stack: As above.
        is_across: Whether the call was given the states of another sequence.
    """

    def __init__(self, module: nn.Module, stack: Stack | None) -> None:
        self.stack, self.is_across = stack, False
        vars(module)[_CONTEXT] = self
        if stack is not None and not {*OTHER_STATES, "attention_mask", "mask"}.isdisjoint(argument_names(module)):
            module.register_forward_pre_hook(self._note, with_kwargs=True)

    @outside_of_graphs
    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note before a call whether it is given the states of another sequence, and how long its own is."""
        assert self.stack is not None, "modules outside of the layers are not watched"
        given = {**dict(zip(argument_names(module), args, strict=False)), **kwargs}
        self.is_across = any(given.get(name) is not None for name in OTHER_STATES)
        self.stack.note_masks(given.values())


@outside_of_graphs
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,  # noqa: FBT001 - transformers' signature
    **more: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' attention functions do, from this rank's positions to all ranks'.

    Returns:
        Shape ``(batch, local positions, heads, size)``, and no weights.

    Raises:
        ConfigError: If the model asks for what is not done here.

    Collective: the sequence parallel ranks, also in backward.
    """
    context: AttentionContext | None = vars(module).get(_CONTEXT)
    if context is None:
        msg = (
            f"A {type(module).__name__} has `_attn_implementation='{ATTENTION_NAME}'` but is in no model that was "
            "boosted with sequence parallelism. Set `config._attn_implementation = 'sdpa'`."
        )
        raise ConfigError(msg)
    if context.stack is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        mask = whole_mask(attention_mask, query.shape[2], key.shape[2])
        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **more}
        alone: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, mask, **options)
        return alone
    stack = context.stack
    asked = [name for name in _REFUSED if more.get(name) is not None and more[name] is not False]
    if asked:
        _refuse(f"asks its attention for '{asked[0]}'", stack)
    stack.num_attentions += 1
    stack.heads.add((query.shape[1], key.shape[1]))
    layout, key_layout = _layouts(query, key, attention_mask, context)
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    causal = causal and not context.is_across
    if torch.is_autocast_enabled(query.device.type):
        # As torch's own attention would, but before anything travels.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    bias = own_bias(more.get("position_bias"), stack, query.shape[1], query.shape[2], key_layout.length)
    if bias is None and more.get("position_bias") is not None and not context.is_across:
        # Between two sequences, models that have biases make zeros of them.
        _refuse("makes its attention's `position_bias` itself, for the positions of one rank,", stack)
    visibility = Visibility(checked(attention_mask, layout.length, key_layout.length), is_causal=causal)
    call = AttentionCall(
        visibility,
        layout,
        stack.group,
        key_layout=key_layout,
        bias=bias,
        sinks=more.get("s_aux"),
        softcap=more.get("softcap"),
        scaling=scaling,
        dropout=dropout if stack.drops else 0.0,
    )
    attend = ring_attention if stack.mode == "ring_attn" else all_to_all_attention
    outputs = attend(query, key, value, call)
    return outputs.transpose(1, 2).contiguous(), None


def _layouts(query: Tensor, key: Tensor, mask: Any, context: AttentionContext) -> tuple[SequenceLayout, SequenceLayout]:
    """Return how the sequences are split of the queries and of the keys."""
    stack = context.stack
    assert stack is not None, "modules outside of the layers attend alone"
    if not stack.note_masks([mask]):
        stack.resume(query.shape[2])
    layout = stack.layout(stack.length)
    if not context.is_across:
        key_layout = layout
    else:
        key_layout = stack.layout(mask.key_length if isinstance(mask, SequenceMask) else stack.key_length)
    found = query.shape[2], key.shape[2]
    rank = stack.group.rank
    if found != (layout.lengths[rank], key_layout.lengths[rank]):
        msg = (
            f"{stack.model_name} attends from {found[0]} positions of this rank to {found[1]} others, which are no "
            "parts of sequences that are split, as with a cache of keys. Pass no `past_key_values`, and generate "
            "without sequence parallelism."
        )
        raise ConfigError(msg)
    return layout, key_layout


def _refuse(what: str, stack: Stack) -> NoReturn:
    msg = (
        f"{stack.model_name} {what}, which `sequence_parallelism_mode={stack.mode!r}` can't do. Use 'split_gather' "
        "with `tp_size`."
    )
    raise ConfigError(msg)


def replace_attention(layers: Sequence[nn.Module]) -> bool:
    """Let the attention of layers that do it themselves come in through `attention`, in place.

    Args:
        layers: The layers of a model.

    Returns:
        Whether there are such.

    Raises:
        ConfigError: If the attention is checkpointed already, or computed in slices.
    """
    modules = [module for layer in layers for module in layer.modules()]
    found = [(module, _FAMILIES[name]) for module in modules if (name := type(module).__name__) in _FAMILIES]
    for module, (method, function) in found:
        if method in vars(module):
            msg = (
                f"`{method}` of a {type(module).__name__} is replaced already, as activation checkpointing does. "
                "Enable it after `boost`, or for whole layers."
            )
            raise ConfigError(msg)
        if getattr(module, "slow_but_exact", False) and getattr(module, "pretraining_tp", 1) > 1:
            msg = "`slow_but_exact=True` sums slices of Bloom's projection, which split sequences do not. Leave it out."
            raise ConfigError(msg)
        vars(module)[method] = functools.partial(function, module)
    return bool(found)


def _of_gptj(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> tuple[Tensor, None]:
    """Stand for ``GPTJAttention._attn``: tensors of shape ``(batch, heads, positions, size)``."""
    outputs, _ = attention(
        module,
        query.to(value.dtype),
        key.to(value.dtype),
        value,
        attention_mask,
        dropout=_dropout(module, "attn_dropout"),
        scaling=1.0 / float(module.scale_attn),
    )
    return outputs.transpose(1, 2), None


def _of_bloom(
    module: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Any,
    layer_past: Any = None,
    use_cache: bool = False,  # noqa: FBT001, FBT002 - likewise
    output_attentions: bool = False,  # noqa: FBT001, FBT002
    **_: Any,
) -> tuple[Tensor, None]:
    """Stand for ``BloomAttention.forward``."""
    del use_cache, output_attentions
    query, key, value = module._reshape(module.query_key_value(hidden_states))  # noqa: SLF001 - the model's own
    outputs, _weights = attention(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=_dropout(module, "attention_dropout"),
        scaling=module.inv_norm_factor,
        position_bias=_by_head(alibi, query) * module.beta,
        cache=layer_past,
    )
    projected = module.dense(outputs.flatten(2))
    return residual + nn.functional.dropout(projected, module.hidden_dropout, module.training), None


def _dropout(module: Any, name: str) -> float:
    return float(getattr(module, name).p) if module.training else 0.0


def _by_head(alibi: Tensor, query: Tensor) -> Tensor:
    """Return biases of shape ``(batch, heads, 1, keys)``, from those of shape ``(batch * heads, 1, keys)``."""
    return alibi.reshape(query.shape[0], query.shape[1], 1, -1)


_FAMILIES: dict[str, tuple[str, Callable[..., Any]]] = {
    "GPTJAttention": ("_attn", _of_gptj),
    "BloomAttention": ("forward", _of_bloom),
}


def enter_through_sdpa(stack: Stack, layers: Sequence[nn.Module]) -> None:
    """Let torch's attention function attend across ranks inside of layers, in place.

    Args:
        stack: What the layers share.
        layers: The layers.

    Raises:
        ConfigError: If a layer's forward is replaced already.
    """
    for layer in layers:
        if "forward" in vars(layer):
            msg = (
                f"The forward of a {type(layer).__name__} is replaced already, as activation checkpointing does. With "
                f"`sequence_parallelism_mode={stack.mode!r}`, enable it after `boost`."
            )
            raise ConfigError(msg)
        vars(layer)["forward"] = functools.partial(_forward, layer)


def _forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Stand for the forward of a layer in which torch's attention function attends across ranks."""
    with _AcrossRanks(layer):
        return type(layer).forward(layer, *args, **kwargs)


class _AcrossRanks(TorchFunctionMode):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = layer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Attend across ranks, or call any other function as it is."""
        del types
        if func is nn.functional.scaled_dot_product_attention:
            return _attend(self._layer, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attend(
    layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - torch's
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002
) -> Tensor:
    """Stand for ``torch.nn.functional.scaled_dot_product_attention``."""
    if query.dim() != 4 or (key.shape[1] not in (1, query.shape[1]) and not enable_gqa):
        msg = (
            f"Split sequences need attention over tensors of shape (batch, heads, positions, size), but "
            f"`scaled_dot_product_attention` was given {tuple(query.shape)} and {tuple(key.shape)}."
        )
        raise ConfigError(msg)
    outputs, _ = attention(layer, query, key, value, attn_mask, dropout=dropout_p, scaling=scale, is_causal=is_causal)
    return outputs.transpose(1, 2)
