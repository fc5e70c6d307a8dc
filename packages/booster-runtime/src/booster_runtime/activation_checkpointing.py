"""Activation checkpointing of chosen modules: their forward is run again in backward instead of kept.

``forward`` is replaced on the chosen modules themselves, so that no module gets another name, and strategies that look
for modules by class or hook their calls find what they always find. The work is ``torch.utils.checkpoint``'s.
Reference: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174).
"""

from __future__ import annotations

import functools
import types
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster_core.errors import ConfigError
from booster_core.plugin import unwrap_model
from booster_core.state import named_modules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["disable_activation_checkpointing", "enable_activation_checkpointing"]

_MARK = "_booster_checkpointed_forward"
_MAX_LISTED = 20
_CACHES = {"past_key_values": None, "past_key_value": None, "layer_past": None, "use_cache": False}
"""What transformers' blocks fill in forward, and what to pass instead."""


def enable_activation_checkpointing(
    model: nn.Module,
    by: str | type[nn.Module] | nn.Module | Callable[[str, nn.Module], bool] | Iterable[Any] | None = None,
    *,
    every: int = 1,
    preserve_random_state: bool = True,
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

    Returns:
        The names of the modules that are checkpointed now.

    Raises:
        TypeError: If ``model`` or ``by`` is of another type.
        ConfigError: If no module is meant, one is checkpointed already (also one around or inside of it), or
            ``every`` is not positive. Nothing is changed then.

    Key and value caches that are passed to such a module are not filled while gradients are computed.

    Memory: of each module its inputs, and the activations of one at a time. Time: one more forward of each.
    Collective: none, but every rank must do the same.
    """
    if not isinstance(model, nn.Module):
        msg = f"`enable_activation_checkpointing` needs a torch.nn.Module; got `{type(model).__name__}`."
        raise TypeError(msg)
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        msg = f"`every={every!r}` is not a number of modules. Use 1 for all that are found, 2 for each second."
        raise ConfigError(msg)
    named: dict[nn.Module, str] = {}
    for name, _, module in named_modules(unwrap_model(model)):
        named.setdefault(module, name)
    found = _repeated_blocks(named) if by is None else _meant(named, by)
    if not found:
        msg = f"No module of `{type(model).__name__}` is meant by `by={by!r}`. {_candidates(named)}"
        raise ConfigError(msg)
    chosen = [module for module in named if module in found][::every]
    _check_apart(named, chosen)
    for module in chosen:
        _checkpoint_forward(module, preserve_random_state=preserve_random_state)
    return [named[module] for module in chosen]


def disable_activation_checkpointing(model: nn.Module) -> None:
    """Take back what `enable_activation_checkpointing` did.

    Collective: none, but every rank must do the same.
    """
    for module in model.modules():
        settings: _Settings | None = vars(module).pop(_MARK, None)
        if settings is not None:
            del module.forward  # the class's own takes its place again
            if settings.forward is not None:
                module.forward = settings.forward


@dataclass(frozen=True)
class _Settings:
    """What a checkpointed module has to remember.

    Args:
        forward: The forward that the module itself had in place of its class's.
        preserve_random_state: As for `enable_activation_checkpointing`.
    """

    forward: Callable[..., Any] | None
    preserve_random_state: bool


def _checkpoint_forward(module: nn.Module, *, preserve_random_state: bool) -> None:
    setattr(module, _MARK, _Settings(vars(module).get("forward"), preserve_random_state))
    # A bound method, unlike a function that remembers the module, is bound to the copy when a module is copied.
    module.forward = types.MethodType(_checkpointed_forward, module)


def _checkpointed_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    settings: _Settings = vars(self)[_MARK]
    forward = functools.partial(type(self).forward, self) if settings.forward is None else settings.forward
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # A cache would be filled a second time in backward.
    kwargs |= {key: empty for key, empty in _CACHES.items() if kwargs.get(key) is not None}
    preserve = settings.preserve_random_state
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=preserve, **kwargs)


def _is_checkpointed(module: nn.Module) -> bool:
    return _MARK in vars(module)


def _check_apart(named: dict[nn.Module, str], chosen: Sequence[nn.Module]) -> None:
    """Raise where a module would be computed more than twice."""
    taken = {module for module in named if _is_checkpointed(module)} | set(chosen)
    again = [named[module] for module in chosen if _is_checkpointed(module)]
    if again:
        msg = (
            f"{len(again)} module(s) are checkpointed already, such as '{again[0]}'. Call "
            "`enable_activation_checkpointing` once, or `disable_activation_checkpointing(model)` first."
        )
        raise ConfigError(msg)
    for outer in taken:
        inner = next((child for child in outer.modules() if child is not outer and child in taken), None)
        if inner is not None:
            msg = (
                f"'{named[inner]}' is inside of '{named[outer]}', and both would be checkpointed: it would be "
                "computed three times. Choose one of them."
            )
            raise ConfigError(msg)
    own = next((module for module in chosen if getattr(module, "gradient_checkpointing", False) is True), None)
    if own is not None:
        msg = (
            f"'{named[own]}' is checkpointed by the model itself. Call `model.gradient_checkpointing_disable()` first, "
            "or leave it at that."
        )
        raise ConfigError(msg)


def _meant(named: dict[nn.Module, str], by: Any) -> set[nn.Module]:
    if isinstance(by, nn.Module):
        if by not in named:
            msg = f"The module `{type(by).__name__}` passed as `by` is not part of the model."
            raise ConfigError(msg)
        return {by}
    if isinstance(by, str):
        return {module for module in named if by in {base.__name__ for base in type(module).__mro__}}
    if isinstance(by, type):
        return {module for module in named if isinstance(module, by)}
    if callable(by):
        return {module for module, name in named.items() if by(name, module)}
    try:
        several = list(by)
    except TypeError:
        msg = (
            "`by` is a module class or its name, a module, several of these, or a function of a name and a module; "
            f"got `{type(by).__name__}`."
        )
        raise TypeError(msg) from None
    found: set[nn.Module] = set()
    for one in several:
        meant = _meant(named, one)
        if not meant:
            msg = f"No module of the model is meant by {one!r} of `by`. {_candidates(named)}"
            raise ConfigError(msg)
        found |= meant
    return found


def _repeated_blocks(named: dict[nn.Module, str]) -> set[nn.Module]:
    """Return the members of all lists of blocks of one class, but for lists inside of such blocks."""
    found: set[nn.Module] = set()
    within: set[nn.Module] = set()
    for module in named:  # parents come first
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or module in within:
            continue
        blocks = list(module)
        if len(blocks) > 1 and len({type(block) for block in blocks}) == 1 and any(blocks[0].children()):
            found.update(blocks)
            within.update(inner for block in blocks for inner in block.modules())
    return found


def _candidates(named: dict[nn.Module, str]) -> str:
    counts = Counter(type(module).__name__ for module in named if next(module.parameters(), None) is not None)
    listed = ", ".join(f"{name} ({count})" for name, count in counts.most_common(_MAX_LISTED))
    return f"Classes of its modules: {listed}."
