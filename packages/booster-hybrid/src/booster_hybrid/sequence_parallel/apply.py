"""Splitting sequences between the layers of an unmodified model.

The model runs on whole sequences, alike on every rank of the sequence axis, but for its lists of layers, which work on
this rank's positions. So positions, masks, poolers, heads and losses are the model's own, whatever they are; what grows
with the number of layers is split. Attention comes in through transformers' registry of attention functions, under a
name that only models split here are set to; in other models through torch's function, or in place of a method.
"""

from __future__ import annotations

import copy
import inspect
import sys
from typing import TYPE_CHECKING, Any

from booster_core.state import compiled_module
from booster_hybrid.modules import ModulePatches
from booster_hybrid.sequence_parallel.attention import (
    ATTENTION_NAME,
    AttentionContext,
    attention,
    enter_through_sdpa,
    replace_attention,
    split_relative_biases,
)
from booster_hybrid.sequence_parallel.layers import lists_of_layers, refuse_options
from booster_hybrid.sequence_parallel.loss import LogitsOfPositions, head_of
from booster_hybrid.sequence_parallel.mask import make_mask
from booster_hybrid.sequence_parallel.mixers import gather_for_mixers
from booster_hybrid.sequence_parallel.stack import Mixers, Stack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from booster_hybrid.mesh import RankGroup
    from booster_hybrid.sequence_parallel.stack import Argument


def split_sequences(
    model: nn.Module,
    lists: Sequence[str],
    mode: str,
    group: RankGroup,
    *,
    parallel_output: bool = False,
    dims: Sequence[dict[Argument, int | None]] = (),
    mixers: Mixers | None = None,
) -> list[tuple[Stack, list[nn.Module]]]:
    """Let a model's layers work on this rank's positions, in place.

    Args:
        model: The user's model.
        lists: Names of the lists of its layers; those that it lacks are passed over.
        mode: ``"all_to_all"`` or ``"ring_attn"``.
        group: The sequence parallel ranks.
        parallel_output: Leave the logits of causal language models that are given labels split by positions.
        dims: Along which dimension what the layers of each list are given is cut, as far as the probe has seen it.
        mixers: What is in the layers besides attention, as far as that is known.

    Returns:
        The layers of each list, with what they share.

    Raises:
        ConfigError: If the model can't be split so.
    """
    model = compiled_module(model) or model
    name = type(model).__name__
    refuse_options(model)
    stacks = [(Stack(mode, group, name), layers) for layers in lists_of_layers(model, lists, mode)]
    for stack, layers in stacks:
        if not (replace_attention(layers) or _uses_registry(model, layers)):
            stack.is_plain = True
            enter_through_sdpa(stack, layers)
    _install_attention(model, stacks)
    for stack, layers in stacks:
        stack.mixers = mixers or stack.mixers
        gather_for_mixers(layers, stack)
        for layer in layers:
            split_relative_biases(layer, stack)
        stack.install(model, layers, ModulePatches())
    for (stack, _), known in zip(stacks, dims, strict=False):
        stack.dims = known
    if parallel_output and has_causal_loss(model):
        LogitsOfPositions(model, stacks[-1][0].layout, group)
    return stacks


def has_causal_loss(model: nn.Module) -> bool:
    """Return whether a model's loss is that of transformers' causal language models, which can be taken in parts."""
    if not hasattr(model, "loss_function"):
        return False
    from transformers.loss.loss_utils import ForCausalLMLoss

    is_causal = model.loss_function is ForCausalLMLoss
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    takes_it = code is None or "loss_function" in code.co_names  # some compute a loss of their own
    return is_causal and takes_it and head_of(model) is not None


def _uses_registry(model: nn.Module, layers: Sequence[nn.Module]) -> bool:
    """Return whether layers call their attention through transformers' registry of such functions."""
    return getattr(model, "_supports_attention_backend", False) or any(
        hasattr(sys.modules.get(type(module).__module__), "ALL_ATTENTION_FUNCTIONS")
        for layer in layers
        for module in layer.modules()
    )


def _install_attention(model: nn.Module, stacks: Sequence[tuple[Stack, Sequence[nn.Module]]]) -> None:
    """Let a model use our attention, and no other model that shares its configuration."""
    stack_of = {module: stack for stack, layers in stacks for layer in layers for module in layer.modules()}
    for module in model.modules():
        AttentionContext(module, stack_of.get(module))
    if all(stack.is_plain for stack, _ in stacks):
        return
    from transformers import PreTrainedConfig
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, make_mask)
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                own = copy.deepcopy(value, memo)
                own._attn_implementation = ATTENTION_NAME  # noqa: SLF001 - the name by which transformers looks it up
                vars(module)[name] = own
