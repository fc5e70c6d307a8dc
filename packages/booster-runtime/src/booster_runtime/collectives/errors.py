"""Errors of collectives."""

from __future__ import annotations

from booster_core.errors import MismatchError

__all__ = ["MismatchError", "PeerEndedError"]


class PeerEndedError(RuntimeError):
    """Another rank's memory can't be read: its process has ended."""
