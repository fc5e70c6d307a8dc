"""Which modules have been changed already: each may be by one function, and not inside of another that is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

CHECKPOINTED = "_booster_checkpointed_forward"
OFFLOADED = "_booster_offloaded_forward"
_WORDS = {CHECKPOINTED: ("checkpointed", "checkpointing"), OFFLOADED: ("offloaded", "offload")}
"""What has been done to a module with each mark, and the end of the name of the function that takes it back."""


def check_apart(named: dict[nn.Module, str], chosen: Sequence[nn.Module]) -> None:
    """Raise where a module would be changed twice, by itself or as a part of another.

    Args:
        named: The modules of the model.
        chosen: Those that are to be changed.

    Raises:
        ConfigError: As above, or if the model itself checkpoints one.
    """
    taken = {module for module in named if _mark_of(module)} | set(chosen)
    again = [module for module in chosen if _mark_of(module)]
    if again:
        done, undo = _WORDS[_mark_of(again[0])]
        msg = (
            f"{len(again)} module(s) are {done} already, such as '{named[again[0]]}'. Call one of "
            "`enable_activation_checkpointing(..., offload=True)` and `enable_activation_offload` once, or "
            f"`disable_activation_{undo}(model)` first."
        )
        raise ConfigError(msg)
    for outer in taken:
        inner = next((child for child in outer.modules() if child is not outer and child in taken), None)
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


def _mark_of(module: nn.Module) -> str:
    return next((mark for mark in _WORDS if mark in vars(module)), "")
