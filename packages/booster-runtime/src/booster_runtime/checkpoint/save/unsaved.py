"""State of a model that only its own ``state_dict`` shows: a save names it instead of leaving it out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from booster_core.errors import CheckpointError, shorten
from booster_core.state import NamedTensors

if TYPE_CHECKING:
    from collections.abc import Sequence

_EXTRA_STATE = "_extra_state"


def check_model_is_saved_whole(model: nn.Module) -> None:
    """Raise if modules add entries to ``state_dict`` that are neither tensors of theirs nor extra state.

    Quantised layers do so (``weight.absmax``), by an own ``_save_to_state_dict`` or by hooks.

    Raises:
        CheckpointError: If so; the message names the entries.

    Collective: none.
    """
    if not any(_adds_entries(module) for module in model.modules()):
        return
    named = NamedTensors.of(model)
    known = {*named.paths, *named.paths.values()}
    # Not by the model's own method, which may take other arguments.
    saved = nn.Module.state_dict(model, keep_vars=True)
    added = [key for key in saved if key not in known and key.rpartition(".")[2] != _EXTRA_STATE]
    if added:
        msg = (
            f"{len(added)} entries of the model's `state_dict` would be lost: {shorten(added)}. They come from an own "
            "`_save_to_state_dict` or from hooks; checkpoints hold parameters, persistent buffers and what "
            "`get_extra_state` returns. Keep them in one of these."
        )
        raise CheckpointError(msg)


def check_optimizer_is_saved_whole(unsaved: Sequence[str]) -> None:
    """Raise if an optimizer holds state that a checkpoint has no place for.

    Args:
        unsaved: Its names, as `StateAdapter.unsaved_state` returns them.

    Raises:
        CheckpointError: If there is any.

    Collective: none.
    """
    if unsaved:
        msg = (
            f"{len(unsaved)} entries of the optimizer's state would be lost, since they belong to no parameter: "
            f"{shorten(unsaved)}. Keep them in a parameter group, or in the state of a parameter."
        )
        raise CheckpointError(msg)


def _adds_entries(module: nn.Module) -> bool:
    own = type(module)._save_to_state_dict is not nn.Module._save_to_state_dict  # noqa: SLF001 - what torch has authors override
    return own or bool(module._state_dict_hooks)  # noqa: SLF001 - torch lists them nowhere else
