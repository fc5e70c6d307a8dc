"""State dicts of models of which each rank holds a part: they can be read and loaded again, and not saved by one rank.

``torch.save`` of such a state writes a file that lacks the other ranks' parts, and says so only to who looks: shards of
equal sizes even load, in the wrong places.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NoReturn

from booster_core.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Self

__all__ = ["mark_as_local", "refuse_pickle"]


class LocalState(OrderedDict[str, Any]):
    """What one rank holds of a model's state; refuses to be pickled."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be saved.

        Raises:
            CheckpointError: Always.
        """
        msg = (
            "This state dict holds one rank's shards of the model, so that a file of it is not one of the whole model. "
            "Call `booster.save_model(model, path)` on every rank, which plain PyTorch and transformers can load."
        )
        raise CheckpointError(msg)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)((name, copy.deepcopy(value, memo)) for name, value in self.items())


def refuse_pickle() -> NoReturn:
    """Refuse to pickle a boosted model of which this rank may hold a part, as ``torch.save`` of the model would.

    Raises:
        CheckpointError: Always.
    """
    msg = (
        "A boosted model of this strategy can't be pickled, as `torch.save(model, path)` does: this process may hold a "
        "part of the model only. Call `booster.save_model(model, path)` on every rank, which plain "
        "PyTorch and transformers can load, or `booster.save_checkpoint` to resume the run."
    )
    raise CheckpointError(msg)


def mark_as_local(model: nn.Module) -> None:
    """Let ``state_dict()`` of a model, of which this rank holds a part, be a `LocalState`."""
    # The public hook can't return another dict.
    model._register_state_dict_hook(_as_local)  # type: ignore[no-untyped-call] # noqa: SLF001


def _as_local(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> dict[str, Any]:
    del module, metadata
    if prefix:  # a part of a larger state
        return state
    local = LocalState(state)
    local._metadata = getattr(state, "_metadata", None)  # type: ignore[attr-defined] # noqa: SLF001 - as torch keeps it
    return local
