"""Selective checkpointing: which operations' results a checkpointed module keeps instead of computing them again.

Reference: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198),
by operation as torchtitan chooses them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Operation: TypeAlias = OpOverload | OpOverloadPacket
    Contexts: TypeAlias = Callable[[], tuple[Any, Any]]

EXPENSIVE = "expensive"

_EXPENSIVE = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_mm",
    "_grouped_mm",
    "_scaled_grouped_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)
"""Operations whose time grows faster than the memory of what they return; some are absent from some versions."""


def contexts_keeping(keep: str | Iterable[Operation]) -> Contexts:
    """Return what ``torch.utils.checkpoint`` takes as ``context_fn``.

    Args:
        keep: As for `enable_activation_checkpointing`.

    Raises:
        TypeError: If something is no operation.
        ConfigError: If it is another word, nothing, or an operation that writes to its arguments.
    """
    return functools.partial(create_selective_checkpoint_contexts, functools.partial(_policy, _packets(keep)))


def _packets(keep: str | Iterable[Operation]) -> frozenset[OpOverloadPacket]:
    if isinstance(keep, str):
        if keep != EXPENSIVE:
            msg = f"`keep={keep!r}` is not known. Use 'expensive', or operations such as [torch.ops.aten.mm]."
            raise ConfigError(msg)
        return frozenset(getattr(torch.ops.aten, name) for name in _EXPENSIVE if hasattr(torch.ops.aten, name))
    packets = set()
    for each in keep:
        packet = each.overloadpacket if isinstance(each, OpOverload) else each
        if not isinstance(packet, OpOverloadPacket):
            msg = f"`keep` has operations, such as `torch.ops.aten.mm`; got `{each!r}`."
            raise TypeError(msg)
        if isinstance(each, OpOverload) and each._schema.is_mutable:  # noqa: SLF001 - no public name
            msg = f"`keep` has `{each}`, which writes to its arguments, so its result can't be kept."
            raise ConfigError(msg)
        packets.add(packet)
    if not packets:
        msg = "`keep` has no operations. Leave it out to recompute everything."
        raise ConfigError(msg)
    return frozenset(packets)


def _policy(
    packets: frozenset[OpOverloadPacket], _: Any, operation: OpOverload, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    # A random operation that isn't run again would leave the generator behind, and what is drawn after it would differ.
    if getattr(operation, "overloadpacket", None) in packets and not _draws(operation, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _draws(operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call draws random numbers: attention does if it has dropout."""
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    for place, argument in enumerate(operation._schema.arguments):  # noqa: SLF001 - no public name
        if argument.name == "dropout_p":
            value = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(value)
    return True
