"""What a load did, and what it found wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAX_SHOWN = 10


def shorten(names: Iterable[str]) -> str:
    """Return names for a message: the first ten, in quotes, and how many more there are."""
    listed = list(names)
    text = ", ".join(f"'{name}'" for name in listed[:_MAX_SHOWN])
    return text if len(listed) <= _MAX_SHOWN else f"{text} and {len(listed) - _MAX_SHOWN} more"


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What `load_model` found; the same on every rank.

    Args:
        loaded: Names of the model's tensors that were read.
        missing: Names of the model's tensors that the checkpoint lacks.
        unexpected: Names of the checkpoint's tensors that the model lacks.
        mismatched: For each tensor that does not fit, why: ``"(3, 4) in the checkpoint, (4, 3) in the model"``.
    """

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: dict[str, str] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether checkpoint and model hold the same tensors."""
        return not (self.missing or self.unexpected or self.mismatched)

    def problems(self) -> str:
        """Return in words what is not complete, with the first ten names of each kind."""
        parts = []
        if self.missing:
            parts.append(f"{len(self.missing)} tensors are missing: {shorten(self.missing)}.")
        if self.unexpected:
            parts.append(f"{len(self.unexpected)} tensors are unexpected: {shorten(self.unexpected)}.")
        if self.mismatched:
            shown = [f"{name} ({why})" for name, why in self.mismatched.items()]
            parts.append(f"{len(self.mismatched)} tensors do not fit: {shorten(shown)}.")
        return " ".join(parts)
