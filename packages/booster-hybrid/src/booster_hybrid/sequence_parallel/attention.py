"""The attention function that models split here are set to, in transformers' registry of such functions.

It attends from this rank's positions to those of all ranks, and, for modules outside of the layers that are split, as
one process does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from booster_core.errors import ConfigError
from booster_hybrid.sequence_parallel.mask import SequenceMask, Visibility, checked, whole_mask
from booster_hybrid.sequence_parallel.relative_bias import own_bias
from booster_hybrid.sequence_parallel.ring_attention import AttentionCall, ring_attention
from booster_hybrid.sequence_parallel.stack import OTHER_STATES, argument_names
from booster_hybrid.sequence_parallel.ulysses import all_to_all_attention
from booster_hybrid.torch_functions import outside_of_graphs

if TYPE_CHECKING:
    from torch import Tensor, nn

    from booster_hybrid.sequence_parallel.layout import SequenceLayout
    from booster_hybrid.sequence_parallel.stack import Stack

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
