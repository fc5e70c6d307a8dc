"""Lazy initialisation: a model is built without memory, and gets its values when it is known where they belong."""

from __future__ import annotations

from booster_core.lazy.context import LazyInitContext
from booster_core.lazy.model import Recording, is_lazy, materialize, take_recording

__all__ = ["LazyInitContext", "Recording", "is_lazy", "materialize", "take_recording"]
