"""Lazy initialisation: a model is built without memory, and gets its values when it is known where they belong."""

from __future__ import annotations

from booster_runtime.lazy.context import LazyInitContext
from booster_runtime.lazy.files import load_pretrained
from booster_runtime.lazy.holders import shards_from_host
from booster_runtime.lazy.recording import (
    Recording,
    hollow_objects,
    is_lazy,
    materialize,
    place_or_hollow,
    take_recording,
)

__all__ = [
    "LazyInitContext",
    "Recording",
    "hollow_objects",
    "is_lazy",
    "load_pretrained",
    "materialize",
    "place_or_hollow",
    "shards_from_host",
    "take_recording",
]
