"""Errors of collectives."""

from __future__ import annotations

from booster_core.errors import BoosterError


class MismatchError(BoosterError, RuntimeError):
    """Ranks call different collectives, or the same one with different reductions, dtypes or lengths."""
