"""Comparing a run under a plugin with the same training in one process, before it costs anything."""

from __future__ import annotations

from booster_tools.verification.comparison import verify
from booster_tools.verification.report import Difference, Verification

__all__ = ["Difference", "Verification", "verify"]
