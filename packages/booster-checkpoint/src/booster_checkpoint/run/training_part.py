"""What a training state holds besides model and optimizer: schedulers, loss scale, position, random states, extra.

Tensors go into ``training_state.safetensors``, everything else into ``training_state.json``. Random states are each
rank's own; everything else is the same on all ranks, or an error.

The state of a registered object, or of a data loader that is not ours, is what ``state_dict`` returns: JSON values and
tensors, never a pickle. One that all ranks share is compared between them by its values and a digest of its tensors,
and stored once; else each rank's is stored.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import torch

from booster_checkpoint.files.names import FileNames
from booster_checkpoint.files.safetensors_file import open_tensor_file
from booster_checkpoint.save.parts import MergedPart, Part, whole_shards
from booster_core.checkpoint_io import LOADER, GlobalPosition
from booster_core.errors import CheckpointDamagedError, CheckpointError, shorten
from booster_core.log import log
from booster_core.ranks import digest
from booster_core.state import (
    capture_random_state,
    check_plain_tensors,
    decode_json,
    encode_json,
    full_box,
    parse_json,
    restore_random_state,
    scheduler_from_json,
    scheduler_state,
    scheduler_to_json,
    separate_random_state,
    tensor_references,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from booster_checkpoint.storage import Location
    from booster_core.checkpoint_io import TrainingObjects
    from booster_core.state import TensorShard

BASE = "training_state"
VALUES = f"{BASE}.json"
TENSORS = f"{BASE}.safetensors"
FORMAT_VERSION = 1
"""Version of ``training_state.json``."""


class TrainingPart(Part):
    """The state of training objects, and the user's own values.

    Args:
        objects: The objects; their state is taken at once.
        rank: This rank.
        step: The step that is saved.
        extra: The user's JSON values and tensors; those of rank 0 are written.

    Attributes:
        frozen: What is noted of frozen parameters that the step leaves out; the same on every rank.

    Raises:
        CheckpointError: If something has no JSON form (its path is named), or the loader has no position.
    """

    def __init__(self, objects: TrainingObjects, *, rank: int, step: int, extra: Any) -> None:
        super().__init__(FileNames(base=BASE))
        self._tensors: dict[str, torch.Tensor] = {}
        self._random = capture_random_state(objects.device, f"random/{rank}", self._tensors)
        self._data_index = objects.data_index
        extra_tensors: dict[str, torch.Tensor] = {}
        self._extra = encode_json(extra, "extra", extra_tensors)
        check_plain_tensors(extra_tensors)
        if rank == 0:
            self._tensors |= extra_tensors
        scaler, loader = objects.loss_scaler, objects.dataloader
        objects.check_dataloader("state_dict")
        self._registered = _RegisteredStates(objects.stateful(), rank, self._tensors)
        position = loader.state_dict() if isinstance(loader, GlobalPosition) else None
        self._shared = {
            "lr_schedulers": [scheduler_to_json(scheduler) for scheduler in objects.schedulers],
            "loss_scaler": None if scaler is None else scaler.state_dict(),
            "dataloader": None if position is None else encode_json(position, "dataloader"),
        }
        self._step = step
        self.frozen: Mapping[str, Any] | None = None

    @property
    def keeps_values(self) -> bool:
        return True

    def owned_shards(self) -> Iterator[TensorShard]:
        yield from whole_shards(self._tensors)

    def facts(self) -> list[Any]:
        return [self._shared, self._extra, self._random, self._data_index, self._registered.facts]

    def merge(self, facts: Sequence[Sequence[Any]], rank: int) -> MergedPart:
        del rank  # all ranks write the same
        shared, extra, *_ = facts[0]
        for other, (theirs, *_) in enumerate(facts):
            for name, value in theirs.items():
                if value != shared[name]:
                    msg = (
                        f"Rank {other} has another state of `{name}` than rank 0: {_cut(value)}, not "
                        f"{_cut(shared[name])}. Step schedulers and loaders alike on all ranks."
                    )
                    raise CheckpointError(msg)
        content = {
            "format_version": FORMAT_VERSION,
            "step": self._step,
            **shared,
            "extra": extra,
            "random": [own for _, _, own, *_ in facts],
            **_random_of([index for *_, index, _ in facts]),
            "registered": _RegisteredStates.merge([states for *_, states in facts]),
            **({} if self.frozen is None else {"frozen": self.frozen}),
        }
        return MergedPart(texts={VALUES: json.dumps(content, indent=1) + "\n"})


def _random_of(indices: list[int]) -> dict[str, list[int]]:
    """Return the indices of ranks whose random states are written, where each rank has not its own number."""
    return {} if indices == list(range(len(indices))) else {"random_of": indices}


_ENTRIES = ("lr_schedulers", "loss_scaler", "dataloader", "extra", "random")


class SavedTraining:
    """What `TrainingPart` wrote, checked, ready to be put back.

    Args:
        folder: The step's folder.

    Attributes:
        extra: The user's own values, tensors on the CPU, once they are read.
        frozen: What is noted of frozen parameters that the step was saved without; ``None`` where it has all.

    Raises:
        CheckpointError: If the files are not a training state's.
    """

    def __init__(self, folder: Location) -> None:
        self._where = folder / VALUES
        written = self._where.read_bytes()
        if written is None:
            msg = f"'{folder}' lacks '{VALUES}'."
            raise CheckpointDamagedError(msg)
        self._content = parse_json(written, str(self._where))
        version = self._content.get("format_version") if isinstance(self._content, dict) else None
        if type(version) is not int:
            msg = f"'{self._where}' does not hold a training state."
            raise CheckpointDamagedError(msg)
        if version > FORMAT_VERSION:
            msg = f"'{self._where}' has format version {version}; this Booster reads up to {FORMAT_VERSION}. Update it."
            raise CheckpointError(msg)
        absent = [name for name in _ENTRIES if name not in self._content]
        if absent or not all(isinstance(self._content[name], list) for name in ("lr_schedulers", "random")):
            msg = (
                f"'{self._where}' is damaged: it lacks {', '.join(absent) or 'lists of schedulers and random states'}."
            )
            raise CheckpointDamagedError(msg)
        self.frozen: Mapping[str, Any] | None = self._content.get("frozen")
        self._tensors = folder / TENSORS
        self._states: Mapping[str, Sequence[Any]] = {}
        self.extra: Any = None

    def check(self, objects: TrainingObjects, world_size: int, *, strict: bool) -> None:
        """Check that everything asked for was saved.

        Args:
            objects: What is to be loaded.
            world_size: Number of ranks that load.
            strict: Raise unless the objects that are registered are those that were; ``False`` loads what fits.

        Raises:
            CheckpointError: If it was not.
        """
        saved = self._content["lr_schedulers"]
        if objects.schedulers and len(saved) != len(objects.schedulers):
            msg = (
                f"'{self._where}' holds the states of {len(saved)} learning rate schedulers; {len(objects.schedulers)} "
                "are to be loaded. Pass those that were saved, in the same order, or none."
            )
            raise CheckpointError(msg)
        for scheduler, content in zip(objects.schedulers, saved, strict=False):
            scheduler_state(scheduler, content, str(self._where))
        if objects.dataloader is not None:
            objects.check_dataloader("load_state_dict")
            is_ours = isinstance(objects.dataloader, GlobalPosition)
            saved_here = self._content["dataloader"] is not None
            saved_apart = LOADER in (self._content.get("registered") or {})
            if not saved_here and not saved_apart:
                msg = f"'{self._where}' was saved without a data loader. Leave out `dataloader`."
                raise CheckpointError(msg)
            if is_ours != saved_here:
                kind = "one that Booster made" if saved_here else "another class than Booster's"
                msg = (
                    f"'{self._where}' holds the position of a data loader of {kind}, and this one is a "
                    f"`{type(objects.dataloader).__name__}`. Make the loader as in the run that saved it."
                )
                raise CheckpointError(msg)
        self._states = _chosen_states(
            self._content.get("registered", {}), objects, world_size, str(self._where), strict=strict
        )

    def read(self, rank: int, data_index: int) -> None:
        """Read everything that this rank takes; `restore_objects` and what follows it only hand it on.

        Args:
            rank: This rank. Where another number of ranks saved, it takes what is kept by rank of ``rank % saved``.
            data_index: Its index among the ranks that see different samples. It takes the random states of a rank of
                this index; where there was none, a stream of its own that begins at another's.

        Raises:
            CheckpointError: If something is not there, or can't be read.
        """
        random = self._content["random"]
        indices = self._content.get("random_of", list(range(len(random))))
        self._stream = 0 if data_index in indices else data_index
        index = data_index % (max(indices) + 1)
        source = rank if rank < len(random) and indices[rank] == index else indices.index(index)
        encoded = [self._content["extra"], random[source]]
        encoded += [states[rank % len(states)] for states in self._states.values()]
        wanted = dict.fromkeys(key for value in encoded for key in tensor_references(value))
        tensors = self._read_tensors(list(wanted))
        self.extra = decode_json(encoded[0], tensors)
        self._random, self._random_tensors = encoded[1], tensors
        self._registered = {
            name: decode_json(value, tensors) for name, value in zip(self._states, encoded[2:], strict=True)
        }

    def restore_objects(self, objects: TrainingObjects) -> None:
        """Put back the states of schedulers, loss scale, data loader and registered objects.

        A loss scale that was not saved (the run was not fp16) stays as it is.
        """
        for scheduler, content in zip(objects.schedulers, self._content["lr_schedulers"], strict=False):
            scheduler_from_json(scheduler, content, str(self._where))
        if objects.loss_scaler is not None and self._content["loss_scaler"] is not None:
            objects.loss_scaler.load_state_dict(self._content["loss_scaler"])
        if isinstance(objects.dataloader, GlobalPosition):
            objects.dataloader.load_state_dict(decode_json(self._content["dataloader"]))
        for name, (item, _) in objects.stateful().items():
            if name in self._registered:
                item.load_state_dict(self._registered[name])

    def restore_random_state(self, device: torch.device) -> None:
        """Put back this rank's random states."""
        restore_random_state(device, self._random, self._random_tensors)
        separate_random_state(self._stream)

    def _read_tensors(self, keys: Sequence[str]) -> Mapping[str, torch.Tensor]:
        if not keys:
            return {}
        file = open_tensor_file(self._tensors.open())
        try:
            tensors = {}
            for key in keys:
                if key not in file.tensors:
                    msg = f"'{self._where}' refers to the tensor '{key}', which '{self._tensors}' lacks."
                    raise CheckpointDamagedError(msg)
                meta = file.tensors[key]
                tensors[key] = torch.empty(meta.shape, dtype=meta.dtype)
                if math.prod(meta.shape):
                    file.read(key, full_box(meta.shape), tensors[key].view(-1))
            return tensors
        finally:
            file.close()


def _cut(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


class _RegisteredStates:
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


def _chosen_states(
    saved: Any, objects: TrainingObjects, world_size: int, where: str, *, strict: bool
) -> dict[str, list[Any]]:
    """Return the saved states of what is registered now.

    Args:
        saved: What `_RegisteredStates.merge` returned in the run that saved it.
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
