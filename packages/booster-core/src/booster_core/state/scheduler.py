"""A learning rate scheduler's state as JSON. What is code (functions, bound methods) is not state and stays out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from booster_core.errors import CheckpointDamagedError, CheckpointError
from booster_core.state.json_values import decode_json, encode_json

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler


def scheduler_to_json(scheduler: LRScheduler) -> dict[str, Any]:
    """Return the kind and the state of a scheduler.

    Raises:
        CheckpointError: If something in its state has no JSON form.
    """
    state = _without_code(scheduler.state_dict())
    return {"scheduler": type(scheduler).__name__, "state": encode_json(state, type(scheduler).__name__)}


def scheduler_from_json(scheduler: LRScheduler, content: Any, where: str) -> None:
    """Give a scheduler the state that `scheduler_to_json` returned of one of its kind.

    Raises:
        CheckpointError: As `scheduler_state` does.
    """
    scheduler.load_state_dict(_with_code_of(scheduler.state_dict(), scheduler_state(scheduler, content, where)))


def scheduler_state(scheduler: LRScheduler, content: Any, where: str) -> dict[str, Any]:
    """Return the state that a checkpoint holds for a scheduler, which stays as it is.

    Args:
        scheduler: The scheduler.
        content: What `scheduler_to_json` returned.
        where: The file, for messages.

    Raises:
        CheckpointError: If it is the state of another kind of scheduler.
        CheckpointDamagedError: If it is the state of none.
    """
    if not isinstance(content, dict) or not {"scheduler", "state"} <= content.keys():
        msg = f"'{where}' does not hold a learning rate scheduler's state."
        raise CheckpointDamagedError(msg)
    if content["scheduler"] != type(scheduler).__name__:
        msg = f"'{where}' holds the state of a {content['scheduler']}; this scheduler is a {type(scheduler).__name__}."
        raise CheckpointError(msg)
    state = decode_json(content["state"])
    if not isinstance(state, dict):
        msg = f"'{where}' is damaged: the state of its {content['scheduler']} is a {type(state).__name__}."
        raise CheckpointDamagedError(msg)
    return state


def _without_code(value: Any) -> Any:
    if type(value) is dict:
        return {key: _without_code(item) for key, item in value.items() if not callable(item)}
    if type(value) in (list, tuple):
        return type(value)(_without_code(item) for item in value)
    return value


def _with_code_of(present: Any, loaded: Any) -> Any:
    """Return loaded state, with the functions that the present state has in its place."""
    if isinstance(present, dict) and isinstance(loaded, dict):
        code = {key: item for key, item in present.items() if callable(item)}
        return (
            {**code, **{key: _with_code_of(present.get(key), item) for key, item in loaded.items()}}
            if type(loaded) is dict
            else loaded
        )
    if isinstance(present, list) and isinstance(loaded, list) and len(present) == len(loaded):
        return [_with_code_of(ours, theirs) for ours, theirs in zip(present, loaded, strict=True)]
    return loaded
