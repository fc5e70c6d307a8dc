"""`SequenceMask`: who may attend to whom in the whole sequence, as transformers' models say it, before it is a tensor.

transformers' models make their masks through one interface, by the name of the attention that is to use them. Ours
keeps the rule (causal, sliding, packed, padded, ...) instead of a tensor, so that each rank makes what it needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor


@dataclass(eq=False)
class SequenceMask:
    """Who may attend to whom in a batch of whole sequences.

    Args:
        batch_size: Number of sequences.
        length: Number of positions.
        rule: Whether a query may see a key, of broadcast indices ``(batch, head, query, key)``.
        padding: Positions that may be seen, shape ``(batch, length)``, bool; ``None`` for all.
        arguments: What else the model asked of the mask.
    """

    batch_size: int
    length: int
    rule: Callable[..., Tensor]
    padding: Tensor | None
    arguments: Mapping[str, Any]
    _whole: tuple[Tensor | None] | None = field(default=None, repr=False)

    def whole(self) -> Tensor | None:
        """Return the mask of the whole sequences, shape ``(batch, 1, length, length)``.

        ``None`` where it is plainly causal, or hides nothing. Made once for all layers.
        """
        if self._whole is None:
            from transformers.masking_utils import sdpa_mask

            arguments = {
                "batch_size": self.batch_size,
                "q_length": self.length,
                "kv_length": self.length,
                "mask_function": self.rule,
                "attention_mask": self.padding,
                **self.arguments,
            }
            self._whole = (sdpa_mask(**arguments),)
        return self._whole[0]


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    **arguments: Any,
) -> SequenceMask:
    """Return the mask that a transformers model asks for; see transformers' ``AttentionMaskInterface``.

    Raises:
        ConfigError: If queries and keys are not the same positions, as with a cache of keys or across two sequences.

    Collective: none.
    """
    if q_length != kv_length or int(q_offset) or int(kv_offset):
        msg = (
            f"Attention from {q_length} positions to {kv_length} is not attention within one sequence, which is all "
            "that sequence parallelism splits. Pass no `past_key_values`, and generate without sequence parallelism."
        )
        raise ConfigError(msg)
    from transformers.masking_utils import causal_mask_function

    rule: Any = causal_mask_function if mask_function is None else mask_function
    return SequenceMask(batch_size, q_length, rule, attention_mask, arguments)


def mask_of(mask: Any, length: int) -> Tensor | None:
    """Return the tensor that a layer's mask stands for.

    Args:
        mask: A `SequenceMask`, ``None``, or a tensor of the user's own, shape
            ``(batch, 1 or heads, length, length)``.
        length: Number of positions of the whole sequence.

    Raises:
        ConfigError: If a tensor is not for the whole sequence.
    """
    whole = mask.whole() if isinstance(mask, SequenceMask) else mask
    if isinstance(whole, torch.Tensor) and tuple(whole.shape[-2:]) != (length, length):
        msg = (
            f"An attention mask of shape {tuple(whole.shape)} does not fit a sequence of {length} positions. Pass one "
            f"for the whole sequence: ({length}, {length}) in its last two dimensions, or 2-D (batch, {length})."
        )
        raise ConfigError(msg)
    return whole
