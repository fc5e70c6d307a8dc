"""The states of objects that a user registered, and of data loaders that are not ours.

A state is what ``state_dict`` returns: JSON values and tensors, never a pickle. One that all ranks share is compared
between them by its values and a digest of its tensors, and stored once; else each rank's is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from booster_core.checkpoint_io import LOADER
from booster_core.errors import CheckpointError, shorten
from booster_core.log import log
from booster_core.ranks import digest
from booster_core.state import check_plain_tensors, encode_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from booster_core.checkpoint_io import TrainingObjects


class RegisteredStates:
    """The present states of registered objects on this rank.

    Args:
        registered: The objects by name, and whether ranks' states differ.
        rank: This rank.
        tensors: Filled with the tensors that this rank writes.

    Attributes:
        facts: What ranks tell each other: for each name whether ranks differ, the state, and a digest of its tensors.

    Raises:
        CheckpointError: If something in a state can't be saved; its path is named.
    """

    def __init__(self, registered: Mapping[str, tuple[Any, bool]], rank: int, tensors: dict[str, torch.Tensor]) -> None:
        self.facts: dict[str, tuple[bool, Any, bytes]] = {}
        for name, (item, per_rank) in registered.items():
            found: dict[str, torch.Tensor] = {}
            prefix = f"registered/{name}"
            state = encode_json(item.state_dict(), f"{prefix}/{rank}" if per_rank else prefix, found)
            check_plain_tensors(found)
            self.facts[name] = per_rank, state, b"" if per_rank else digest(found)
            if per_rank or rank == 0:
                tensors |= found

    @staticmethod
    def merge(facts: Sequence[Mapping[str, tuple[bool, Any, bytes]]]) -> dict[str, Any]:
        """Return what is stored of all ranks' states.

        Raises:
            CheckpointError: If ranks have registered other objects, or differ in one that they share.
        """
        for rank, theirs in enumerate(facts):
            if [(name, per_rank) for name, (per_rank, *_) in theirs.items()] != [
                (name, per_rank) for name, (per_rank, *_) in facts[0].items()
            ]:
                msg = (
                    f"Ranks 0 and {rank} have registered other objects: {list(facts[0])} and {list(theirs)}. Call "
                    "`register_for_checkpointing` alike on all ranks."
                )
                raise CheckpointError(msg)
        merged: dict[str, Any] = {}
        for name, (per_rank, state, values) in facts[0].items():
            for rank, theirs in enumerate(facts):
                if not per_rank and theirs[name][1:] != (state, values):
                    msg = (
                        f"The registered object '{name}' has another state on rank {rank} than on rank 0. Keep it "
                        "alike on all ranks, or register it with `per_rank=True`."
                    )
                    raise CheckpointError(msg)
            merged[name] = {"per_rank": per_rank, "states": [own[name][1] for own in facts] if per_rank else [state]}
        return merged


def chosen_states(
    saved: Any, objects: TrainingObjects, world_size: int, where: str, *, strict: bool
) -> dict[str, list[Any]]:
    """Return the saved states of what is registered now.

    Args:
        saved: What `RegisteredStates.merge` returned in the run that saved it.
        objects: What is to be loaded.
        world_size: Number of ranks that load.
        where: The file, for messages.
        strict: Raise unless saved and registered objects are the same, where any are registered.

    Raises:
        CheckpointError: If they don't fit.
    """
    if not isinstance(saved, dict) or not all(
        isinstance(entry, dict) and isinstance(entry.get("states"), list) and entry["states"]
        for entry in saved.values()
    ):
        msg = f"'{where}' is damaged: its states of registered objects are none."
        raise CheckpointError(msg)
    wanted = objects.stateful()
    missing = [name for name in wanted if name not in saved]
    left = [name for name in saved if name not in wanted and name != LOADER] if objects.registered else []
    problems = [f"It was saved without {shorten(missing)}."] if missing else []
    problems += [f"It holds {shorten(left)}, which nobody registered here."] if left else []
    chosen = {}
    for name, (_, per_rank) in wanted.items():
        entry = saved.get(name)
        if entry is None:
            continue
        states, what = entry["states"], "The data loader" if name == LOADER else f"The registered object '{name}'"
        if bool(entry.get("per_rank")) != per_rank:
            problems.append(f"{what} was saved with `per_rank={not per_rank}`, and is registered with {per_rank}.")
        elif per_rank and len(states) != world_size and (name == LOADER or any(each != states[0] for each in states)):
            # equal positions of loaders are of each rank's own samples, and mean others on other ranks
            problems.append(f"{what} has a state of each of {len(states)} ranks, and {world_size} load it.")
        else:
            chosen[name] = states
    if problems and strict:
        msg = f"'{where}' does not fit what is registered. {' '.join(problems)} Pass `strict=False` to load what fits."
        raise CheckpointError(msg)
    if problems:
        log.warning("'%s' does not fit all that is registered. %s", where, " ".join(problems))
    return chosen
