"""Whether a checkpoint fits a model or an optimizer: decided from names, shapes and dtypes, before values change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from booster_core.checkpoint_io import LoadReport
from booster_core.errors import CheckpointError, shorten
from booster_core.state import TensorMeta, distinct, tensor_references

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from booster_core.state import OptimizerInfo, StateAdapter

__all__ = [
    "Expectation",
    "check_same_parameters",
    "check_states",
    "compare",
    "listed_states",
    "misfit",
    "states_by_parameter",
]


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """The tensors of a model, as far as one rank holds them.

    Args:
        tensors: What each tensor is, by name.
        aliases: For each further name of a tied tensor, its first name.
        extra: Names of extra state.
    """

    tensors: Mapping[str, TensorMeta]
    aliases: Mapping[str, str]
    extra: tuple[str, ...]

    @classmethod
    def of(cls, adapter: StateAdapter, extra: tuple[str, ...]) -> Expectation:
        """Return what this rank holds."""
        tensors = {
            shard.name: TensorMeta(shape=shard.global_shape, dtype=shard.dtype) for shard in adapter.model_shards()
        }
        return cls(tensors=tensors, aliases=dict(adapter.tied_names()), extra=extra)

    @classmethod
    def merge(cls, parts: Sequence[Expectation]) -> Expectation:
        """Return what all ranks expect together."""
        tensors: dict[str, TensorMeta] = {}
        aliases: dict[str, str] = {}
        extra: dict[str, None] = {}
        for part in distinct(parts):
            tensors |= part.tensors
            aliases |= part.aliases
            extra |= dict.fromkeys(part.extra)
        return cls(tensors=tensors, aliases=aliases, extra=tuple(extra))


def misfit(stored: TensorMeta, expected: TensorMeta) -> str | None:
    """Return why a stored tensor cannot be read into an expected one, or ``None`` if it can.

    Floating values are converted between formats; other kinds have to be the same.
    """
    if stored.shape != expected.shape:
        return f"shape {stored.shape} in the checkpoint, {expected.shape} here"
    both_floating = stored.dtype.is_floating_point and expected.dtype.is_floating_point
    both_complex = stored.dtype.is_complex and expected.dtype.is_complex
    if stored.dtype != expected.dtype and not both_floating and not both_complex:
        return f"{stored.dtype} in the checkpoint, {expected.dtype} here"
    return None


def compare(
    stored: Mapping[str, TensorMeta], values: Mapping[str, Any], expected: Expectation
) -> tuple[LoadReport, dict[str, str]]:
    """Return what fits and what does not, and for each tensor that fits its name in the checkpoint.

    Args:
        stored: The checkpoint's tensors.
        values: The checkpoint's other values, as encoded JSON.
        expected: What all ranks expect.
    """
    names_of: dict[str, list[str]] = {name: [name] for name in expected.tensors}
    for alias, name in expected.aliases.items():
        names_of.setdefault(name, [name]).append(alias)
    homes: dict[str, str] = {}
    missing, mismatched, known = [], {}, set[str]()
    for name, meta in expected.tensors.items():
        known.update(names_of[name])
        home = next((candidate for candidate in names_of[name] if candidate in stored), None)
        if home is None:
            missing.append(name)
        elif (reason := misfit(stored[home], meta)) is not None:
            mismatched[name] = reason
        else:
            homes[name] = home
    for name in expected.extra:
        known.add(name)
        if name in values:
            known.update(tensor_references(values[name]))
        elif name not in stored:
            missing.append(name)
    inside = {key for value in values.values() for key in tensor_references(value)}
    unexpected = [name for name in stored if name not in known and name not in inside]
    unexpected += [name for name in values if name not in known]
    report = LoadReport(
        loaded=tuple(homes), missing=tuple(missing), unexpected=tuple(unexpected), mismatched=mismatched
    )
    return report, homes


def check_same_parameters(path: object, saved: OptimizerInfo, here: OptimizerInfo) -> None:
    """Raise `CheckpointError` unless groups list the same parameters, of the same shapes."""
    if len(saved.groups) != len(here.groups):
        msg = (
            f"'{path}' has {len(saved.groups)} parameter groups, this optimizer has {len(here.groups)}. Build it "
            "alike, with `add_param_group` for those that were added during the run, before you load; or load the "
            "model alone."
        )
        raise CheckpointError(msg)
    for index, (theirs, ours) in enumerate(zip(saved.groups, here.groups, strict=True)):
        their_names, our_names = set(theirs.params), set(ours.params)
        lacking = [name for name in ours.params if name not in their_names]
        surplus = [name for name in theirs.params if name not in our_names]
        if lacking or surplus:
            parts = [f"It lacks {len(lacking)}: {shorten(lacking)}."] if lacking else []
            parts += [f"It has {len(surplus)} more: {shorten(surplus)}."] if surplus else []
            msg = (
                f"'{path}' is of another optimizer: parameter group {index} lists other parameters. {' '.join(parts)} "
                "List those that were saved, or load the model alone."
            )
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
    path: object, tensors: Mapping[str, TensorMeta], saved: OptimizerInfo
) -> dict[str, dict[str, TensorMeta]]:
    """Return what the checkpoint holds by parameter and state name, for `prepare_optimizer_load`."""
    members = {name for group in saved.groups for name in group.params}
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
    return saved.with_own_dtypes(states)


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
    path: object, stored: Mapping[str, TensorMeta], gathered: Sequence[tuple[list[str], dict[str, str]]]
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
