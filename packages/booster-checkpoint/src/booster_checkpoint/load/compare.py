"""Compares what a checkpoint holds with what a model expects, from names, shapes and dtypes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from booster_checkpoint.session import distinct
from booster_core.checkpoint_io import LoadReport
from booster_core.state import TensorMeta, tensor_references

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from booster_core.state import StateAdapter


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
