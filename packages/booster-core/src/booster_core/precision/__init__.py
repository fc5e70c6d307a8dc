"""Numeric formats of a run: what parameters, compute, reductions, masters and checkpoints are kept in."""

from __future__ import annotations

from booster_core.precision.loss_scaler import DynamicLossScaler, LossScaleConfig
from booster_core.precision.policy import PrecisionPolicy

__all__ = ["DynamicLossScaler", "LossScaleConfig", "PrecisionPolicy"]
