"""Loops that are the same under every plugin: whole steps, accumulation windows, ranks with uneven batches."""

from __future__ import annotations

from booster_runtime.loops.accumulation import accumulate
from booster_runtime.loops.batches import Evaluation, evaluate_batch, train_batch
from booster_runtime.loops.stop_signal import StopSignal
from booster_runtime.loops.uneven import join

__all__ = ["Evaluation", "StopSignal", "accumulate", "evaluate_batch", "join", "train_batch"]
