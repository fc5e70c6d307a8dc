"""Whether an optimizer's checkpoint fits this run's optimizer: decided before its values change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_checkpoint.files.index import read_json
from booster_checkpoint.files.optimizer_info import OptimizerInfo
from booster_checkpoint.load.compare import misfit
from booster_checkpoint.session import distinct
from booster_core.errors import CheckpointError, shorten
from booster_core.state import TensorMeta

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from booster_checkpoint.load.source import Source
    from booster_core.state import StateAdapter


def read_optimizer_info(source: Source) -> OptimizerInfo:
    """Return parameter groups and other state: from the file itself, or from the file next to the index."""
    if "optimizer" in source.values:
        return OptimizerInfo.from_json(source.values["optimizer"], str(source.path))
    path = source.groups_path
    if path is None or not path.is_file():
        msg = f"'{source.path}' holds no optimizer checkpoint: it comes without parameter groups ('param_groups.json')."
        raise CheckpointError(msg)
    return OptimizerInfo.from_json(read_json(path), str(path))


def check_same_parameters(path: Path, saved: OptimizerInfo, here: OptimizerInfo) -> None:
    """Raise `CheckpointError` unless groups list the same parameters, of the same shapes."""
    if len(saved.groups) != len(here.groups):
        msg = (
            f"'{path}' has {len(saved.groups)} parameter groups, this optimizer has {len(here.groups)}. Build it alike."
        )
        raise CheckpointError(msg)
    for index, (theirs, ours) in enumerate(zip(saved.groups, here.groups, strict=True)):
        their_names, our_names = set(theirs.params), set(ours.params)
        lacking = [name for name in ours.params if name not in their_names]
        surplus = [name for name in theirs.params if name not in our_names]
        if lacking or surplus:
            parts = [f"It lacks {len(lacking)}: {shorten(lacking)}."] if lacking else []
            parts += [f"It has {len(surplus)} more: {shorten(surplus)}."] if surplus else []
            msg = f"'{path}' is of another optimizer: parameter group {index} lists other parameters. {' '.join(parts)}"
            raise CheckpointError(msg)
    wrong = [
        f"{name} ({shape} in the checkpoint, {here.shapes[name]} here)"
        for name, shape in saved.shapes.items()
        if name in here.shapes and here.shapes[name] != shape
    ]
    if wrong:
        msg = f"'{path}' is of another model's optimizer: {len(wrong)} parameters have other shapes: {shorten(wrong)}."
        raise CheckpointError(msg)


def states_by_parameter(
    path: Path, tensors: Mapping[str, TensorMeta], here: OptimizerInfo
) -> dict[str, dict[str, TensorMeta]]:
    """Return what the checkpoint holds by parameter and state name."""
    members = {name for group in here.groups for name in group.params}
    states: dict[str, dict[str, TensorMeta]] = {}
    unknown = []
    for key, meta in tensors.items():
        cuts = [index for index, character in enumerate(key) if character == "/" and key[:index] in members]
        if not cuts:
            unknown.append(key)
            continue
        states.setdefault(key[: cuts[-1]], {})[key[cuts[-1] + 1 :]] = meta
    if unknown:
        msg = f"'{path}' holds {len(unknown)} tensors of no parameter of this optimizer: {shorten(unknown)}."
        raise CheckpointError(msg)
    return states


def listed_states(adapter: StateAdapter, stored: Mapping[str, TensorMeta]) -> tuple[list[str], dict[str, str]]:
    """Return which states this rank has room for, and those that do not fit."""
    listed, misfits = dict[str, None](), {}
    for shard in adapter.optimizer_shards():
        key = shard.key
        listed[key] = None
        if key in stored:
            reason = misfit(stored[key], TensorMeta(shape=shard.global_shape, dtype=shard.dtype))
            if reason is not None:
                misfits[key] = reason
    return list(listed), misfits


def check_states(
    path: Path, stored: Mapping[str, TensorMeta], gathered: Sequence[tuple[list[str], dict[str, str]]]
) -> None:
    """Raise `CheckpointError` unless every tensor of the checkpoint has a place that it fits, on some rank."""
    told = distinct(gathered)
    listed = set().union(*(entry[0] for entry in told))
    misfits = {key: reason for entry in told for key, reason in entry[1].items()}
    homeless = [key for key in stored if key not in listed]
    if misfits:
        shown = [f"{key} ({reason})" for key, reason in misfits.items()]
        msg = f"'{path}' does not fit this optimizer: {len(misfits)} tensors differ: {shorten(shown)}."
        raise CheckpointError(msg)
    if homeless:
        msg = f"'{path}' holds {len(homeless)} tensors that this optimizer has no place for: {shorten(homeless)}."
        raise CheckpointError(msg)
