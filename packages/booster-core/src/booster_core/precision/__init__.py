"""Number formats of a run: parameters, compute, reductions, master weights and checkpoints."""

from __future__ import annotations

from booster_core.precision.casting import cast_floating
from booster_core.precision.loss_scaler import DynamicLossScaler, LossScaleConfig
from booster_core.precision.policy import NARROW, PrecisionPolicy

__all__ = [
    "NARROW",
    "DynamicLossScaler",
    "LossScaleConfig",
    "PrecisionPolicy",
    "cast_floating",
]
