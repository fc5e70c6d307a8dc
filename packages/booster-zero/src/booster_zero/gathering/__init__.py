"""Parameters that are gathered while they are used, and sharded in between: what Gemini and ZeRO-3 of hybrid share.

`ParameterHooks` gather them for a model's forward, and for its backward where that needs their values.
"""

from __future__ import annotations

from booster_zero.gathering.hooks import LeafModules, ParameterHooks, check_modules

__all__ = [
    "LeafModules",
    "ParameterHooks",
    "check_modules",
]
