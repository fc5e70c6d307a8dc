"""The former place of what booster-trainer has; deprecated, until 0.3."""

from __future__ import annotations

import importlib
import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    if name not in ("BoosterTrainer", "with_booster"):
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    try:
        trainer = importlib.import_module("booster_trainer")
    except ModuleNotFoundError as cause:
        msg = f"`{name}` is in `booster_trainer` now: `pip install booster-trainer` ({cause})."
        raise ImportError(msg) from cause
    warnings.warn(f"Import `{name}` from `booster_trainer`.", DeprecationWarning, stacklevel=2)
    return getattr(trainer, name)
