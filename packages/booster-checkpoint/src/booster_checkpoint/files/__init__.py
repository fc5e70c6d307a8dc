"""The kinds of files: how each is laid out, written and read, and the names of a checkpoint's files."""

from __future__ import annotations

from booster_checkpoint.files.composed import ComposedTensors, Layout
from booster_checkpoint.files.names import MODEL
from booster_checkpoint.files.safetensors_file import SafetensorsFile

__all__ = ["MODEL", "ComposedTensors", "Layout", "SafetensorsFile"]
