"""Numeric formats of a run: what parameters, compute, reductions, masters and checkpoints are kept in."""

from __future__ import annotations

from booster_core.precision.casting import cast_floating
from booster_core.precision.loss_scaler import DynamicLossScaler, LossScaleConfig
from booster_core.precision.narrow import NARROW, kept_as_they_are, working_dtypes
from booster_core.precision.policy import PrecisionPolicy

__all__ = [
    "NARROW",
    "DynamicLossScaler",
    "LossScaleConfig",
    "PrecisionPolicy",
    "cast_floating",
    "kept_as_they_are",
    "working_dtypes",
]
