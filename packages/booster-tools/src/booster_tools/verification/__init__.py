"""Comparing a run under a plugin with the same training in one process, before it costs anything."""

from __future__ import annotations

from booster_tools.verification.comparison import verify
from booster_tools.verification.report import Difference, Verification
from booster_tools.verification.script import function_of, module_of

__all__ = ["Difference", "Verification", "function_of", "module_of", "verify"]
