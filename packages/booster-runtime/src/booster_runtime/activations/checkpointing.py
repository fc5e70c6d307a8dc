"""Activation checkpointing of chosen modules: their forward is run again in backward instead of kept.

``forward`` is replaced on the chosen modules themselves, so that no module gets another name, and strategies that look
for modules by class or hook their calls find what they always find. The work is ``torch.utils.checkpoint``'s.
Reference: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from booster_runtime.activations.chosen import chosen_modules, names_of
from booster_runtime.activations.forwards import Replaced, replace_forward, restore_forwards
from booster_runtime.activations.kept_operations import contexts_keeping
from booster_runtime.activations.marks import CHECKPOINTED, check_apart
from booster_runtime.activations.saved_on_host import SavedOnHost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn

    from booster_runtime.activations.kept_operations import Contexts, Operation

_CACHES = {"past_key_values": None, "past_key_value": None, "layer_past": None, "use_cache": False}
"""What transformers' blocks fill in forward, and what to pass instead."""


def enable_activation_checkpointing(
    model: nn.Module,
    by: str | type[nn.Module] | nn.Module | Callable[[str, nn.Module], bool] | Iterable[Any] | None = None,
    *,
    every: int = 1,
    preserve_random_state: bool = True,
    keep: str | Iterable[Operation] | None = None,
    offload: bool = False,
) -> list[str]:
    """Let modules keep only their inputs for backward, and compute the rest again there.

    Works before and after ``boost``, under any plugin, and with ``torch.compile``. A model's own switch, such as
    transformers' ``gradient_checkpointing_enable``, does the same and is left alone by ``boost``; use one of the two.

    Args:
        model: The model, boosted or not.
        by: Which modules: a class or its name (``"LlamaDecoderLayer"``), a module, several of these, or a function
            of a module's name in the user's model and the module. By default the model's repeated blocks: what is in a
            ``ModuleList`` or ``Sequential`` of several modules of one class.
        every: Of the modules found, in the model's order, take the first, and then each ``every``-th.
        preserve_random_state: Let dropout draw in backward what it drew in forward; costs a copy of the random state
            per module and step.
        keep: Operations whose results are kept as well, so that they aren't computed twice: ``"expensive"`` for matrix
            products, convolutions and attention, or operations such as ``[torch.ops.aten.mm]``. Calls that draw random
            numbers, as attention with dropout does, are computed again all the same. Not with ``torch.compile`` under
            Gemini, where torch raises.
        offload: Keep the modules' inputs in page-locked memory of the host instead of on the device, from 1 MiB on;
            they travel while the device computes. What ``keep`` keeps stays on the device. Without effect on the CPU.

    Returns:
        The names of the modules that are checkpointed now.

    Raises:
        TypeError: If ``model``, ``by`` or an operation of ``keep`` is of another type.
        ConfigError: If no module is meant, one is checkpointed or offloaded already (also one around or inside of it),
            ``every`` is not positive, or ``keep`` can't be kept. Nothing is changed then.

    Key and value caches that are passed to such a module are not filled while gradients are computed.

    Memory: of each module its inputs, and the activations of one at a time. Time: one more forward of each, without
    the operations of ``keep``, whose results are the price.
    Collective: none, but every rank must do the same.
    """
    chosen = chosen_modules(model, by, every, "enable_activation_checkpointing")
    contexts = None if keep is None else contexts_keeping(keep)
    check_apart(names_of(model), list(chosen))
    saved = SavedOnHost() if offload else None
    for module in chosen:
        settings = _Settings(
            own=vars(module).get("forward"), preserve_random_state=preserve_random_state, contexts=contexts, saved=saved
        )
        replace_forward(module, CHECKPOINTED, settings, _checkpointed_forward)
    return list(chosen.values())


def disable_activation_checkpointing(model: nn.Module) -> None:
    """Take back what `enable_activation_checkpointing` did.

    Collective: none, but every rank must do the same.
    """
    restore_forwards(model, CHECKPOINTED)


@dataclass(frozen=True, kw_only=True)
class _Settings(Replaced):
    """What a checkpointed module has to remember.

    Args:
        preserve_random_state: As for `enable_activation_checkpointing`.
        contexts: What torch runs forward and its repetition in, where some results are kept.
        saved: Keeps inputs on the host, if they are to be there.
    """

    preserve_random_state: bool
    contexts: Contexts | None
    saved: SavedOnHost | None


def _checkpointed_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    settings: _Settings = vars(self)[CHECKPOINTED]
    forward = settings.forward_of(self)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # A cache would be filled a second time in backward.
    kwargs |= {key: empty for key, empty in _CACHES.items() if kwargs.get(key) is not None}
    kwargs["use_reentrant"], kwargs["preserve_rng_state"] = False, settings.preserve_random_state
    if settings.contexts is not None:  # torch.compile can't trace one under every plugin
        kwargs["context_fn"] = settings.contexts
    if settings.saved is not None:
        return settings.saved.run(self, checkpoint, forward, *args, **kwargs)
    return checkpoint(forward, *args, **kwargs)
