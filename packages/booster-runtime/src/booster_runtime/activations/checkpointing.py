"""Less memory for activations: chosen modules run forward again in backward, or keep what they save on the host.

``forward`` is replaced on the chosen modules themselves, so that no module gets another name, and strategies that look
for modules by class or hook their calls find what they always find. The work is ``torch.utils.checkpoint``'s.
Reference: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174).
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from booster_core.errors import ConfigError
from booster_runtime.activations.kept_operations import contexts_keeping
from booster_runtime.activations.offload import LEAST_BYTES, ActivationOffload
from booster_runtime.activations.selection import module_names, select_modules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from booster_runtime.activations.kept_operations import Contexts, Operation

_MARK = "_booster_replaced_forward"
"""The attribute of a module that says how its forward was replaced."""
_CHECKPOINTING, _OFFLOAD = "checkpointing", "offload"
_DONE = {_CHECKPOINTING: "checkpointed", _OFFLOAD: "offloaded"}

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
    chosen = select_modules(model, by, every, "enable_activation_checkpointing")
    contexts = None if keep is None else contexts_keeping(keep)
    _check_apart(module_names(model), list(chosen))
    shared = ActivationOffload() if offload else None
    for module in chosen:
        replaced = _Replaced(
            how=_CHECKPOINTING,
            **_place_of_forward(module),
            preserve_random_state=preserve_random_state,
            contexts=contexts,
            offload=shared,
        )
        _replace_forward(module, replaced, _checkpointed_forward)
    return list(chosen.values())


def disable_activation_checkpointing(model: nn.Module) -> None:
    """Take back what `enable_activation_checkpointing` did.

    Collective: none, but every rank must do the same.
    """
    _restore_forwards(model, _CHECKPOINTING)


def enable_activation_offload(
    model: nn.Module,
    by: str | type[nn.Module] | nn.Module | Callable[[str, nn.Module], bool] | Iterable[Any] | None = None,
    *,
    every: int = 1,
    least_bytes: int = LEAST_BYTES,
) -> list[str]:
    """Let modules keep what they save for backward in page-locked memory of the host.

    It travels in a stream of its own while the device computes on, and comes back one module ahead of backward. Works
    before and after ``boost``, under any plugin. On the CPU, whose memory is the host's, nothing is copied.

    Args:
        model: The model, boosted or not.
        by: Which modules; as for `enable_activation_checkpointing`.
        every: Of the modules found, in the model's order, take the first, and then each ``every``-th.
        least_bytes: Memory of fewer bytes stays on the device.

    Returns:
        The names of the modules that are offloaded now.

    Raises:
        TypeError: If ``model`` or ``by`` is of another type.
        ConfigError: If no module is meant, one is checkpointed or offloaded already (also one around or inside of it),
            or a number is not positive. Nothing is changed then.

    Parameters and buffers stay, and so do views that are conjugates, sparse tensors and tensors of other classes.
    ``torch.compile`` compiles what is inside of a module, and not across its border.

    Memory: of the device what two modules save, and what is in flight; of the host what all of them save.
    Time: each byte crosses the bus twice a step. To recompute instead, and to keep only inputs on the host, see
    `enable_activation_checkpointing`.
    """
    chosen = select_modules(model, by, every, "enable_activation_offload")
    if not isinstance(least_bytes, int) or isinstance(least_bytes, bool) or least_bytes < 1:
        msg = f"`least_bytes={least_bytes!r}` is not a positive number of bytes."
        raise ConfigError(msg)
    _check_apart(module_names(model), list(chosen))
    shared = ActivationOffload(least_bytes)
    for module in chosen:
        replaced = _Replaced(how=_OFFLOAD, **_place_of_forward(module), offload=shared)
        _replace_forward(module, replaced, _offloaded_forward)
    return list(chosen.values())


def disable_activation_offload(model: nn.Module) -> None:
    """Take back what `enable_activation_offload` did."""
    _restore_forwards(model, _OFFLOAD)


@dataclass(frozen=True, kw_only=True)
class _Replaced:
    """What a module whose forward is replaced has to remember; copies of the module have it as well.

    Args:
        how: By which function: the end of the name of the one that takes it back.
        own: The forward that the module itself had in place of its class's.
        around: A strategy's forward of the module, such as that of a pipeline stage, inside of which this one is.
        offload: Keeps on the host what is saved for backward, if that is to be there.
        preserve_random_state: As for `enable_activation_checkpointing`.
        contexts: What torch runs forward and its repetition in, where some results are kept.
    """

    how: str
    own: Callable[..., Any] | None
    around: Any
    offload: ActivationOffload | None
    preserve_random_state: bool = True
    contexts: Contexts | None = None

    def forward_of(self, module: nn.Module) -> Callable[..., Any]:
        """Return the forward that was replaced."""
        return functools.partial(type(module).forward, module) if self.own is None else self.own


def _checkpointed_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    replaced: _Replaced = vars(self)[_MARK]
    forward = replaced.forward_of(self)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # A cache would be filled a second time in backward.
    kwargs |= {key: empty for key, empty in _CACHES.items() if kwargs.get(key) is not None}
    kwargs["use_reentrant"], kwargs["preserve_rng_state"] = False, replaced.preserve_random_state
    if replaced.contexts is not None:  # torch.compile can't trace one under every plugin
        kwargs["context_fn"] = replaced.contexts
    if replaced.offload is not None:
        return replaced.offload.run(self, checkpoint, forward, *args, **kwargs)
    return checkpoint(forward, *args, **kwargs)


def _offloaded_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    replaced: _Replaced = vars(self)[_MARK]
    assert replaced.offload is not None, "it is what this forward is for"
    return replaced.offload.run(self, replaced.forward_of(self), *args, **kwargs)


def _place_of_forward(module: nn.Module) -> dict[str, Any]:
    """Return the forward that is to be replaced, and what is around it: what has the attribute ``takes_inside``."""
    own: Any = vars(module).get("forward")
    if getattr(own, "takes_inside", False):
        return {"own": own.forward, "around": own}
    return {"own": own, "around": None}


def _replace_forward(module: nn.Module, replaced: _Replaced, forward: Callable[..., Any]) -> None:
    setattr(module, _MARK, replaced)
    # A bound method, unlike a function that remembers the module, is bound to the copy when a module is copied.
    bound = types.MethodType(forward, module)
    if replaced.around is None:
        module.forward = bound
    else:
        replaced.around.forward = bound


def _restore_forwards(model: nn.Module, how: str) -> None:
    for module in model.modules():
        replaced = _replaced(module)
        if replaced is not None and replaced.how == how:
            del vars(module)[_MARK]
            if replaced.around is not None:
                replaced.around.forward = replaced.own
                continue
            del module.forward  # the class's own takes its place again
            if replaced.own is not None:
                module.forward = replaced.own


def _replaced(module: nn.Module) -> _Replaced | None:
    return vars(module).get(_MARK)


def _check_apart(named: dict[nn.Module, str], chosen: Sequence[nn.Module]) -> None:
    """Raise where a module would be changed twice, by itself or as a part of another, or is checkpointed by its model.

    Args:
        named: The modules of the model.
        chosen: Those that are to be changed.
    """
    again = [(module, replaced) for module in chosen if (replaced := _replaced(module)) is not None]
    if again:
        module, replaced = again[0]
        msg = (
            f"{len(again)} module(s) are {_DONE[replaced.how]} already, such as '{named[module]}'. Call one of "
            "`enable_activation_checkpointing(..., offload=True)` and `enable_activation_offload` once, or "
            f"`disable_activation_{replaced.how}(model)` first."
        )
        raise ConfigError(msg)
    changed = {module for module in named if _replaced(module) is not None} | set(chosen)
    for outer in changed:
        inner = next((child for child in outer.modules() if child is not outer and child in changed), None)
        if inner is not None:
            msg = (
                f"'{named[inner]}' is inside of '{named[outer]}', and both would be checkpointed or offloaded: it "
                "would be computed three times, or copied twice. Choose one of them."
            )
            raise ConfigError(msg)
    own = next((module for module in chosen if getattr(module, "gradient_checkpointing", False) is True), None)
    if own is not None:
        msg = (
            f"'{named[own]}' is checkpointed by the model itself. Call `model.gradient_checkpointing_disable()` first, "
            "or leave it at that."
        )
        raise ConfigError(msg)
