"""Norms and clipping of gradients that may be spread over ranks."""

from __future__ import annotations

from booster_core.gradients.clip import clip_by_norm
from booster_core.gradients.norm import check_finite_norm, global_norm

__all__ = [
    "check_finite_norm",
    "clip_by_norm",
    "global_norm",
]
