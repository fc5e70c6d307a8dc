"""Checkpoints: one writer and one reader for every plugin, in the file layouts that others can read."""

from booster_core.checkpoint_io import LoadReport
from booster_runtime.checkpoint.checkpoint_files import CheckpointFiles
from booster_runtime.checkpoint.engine import CheckpointEngine
from booster_runtime.checkpoint.files.layout import WrittenFile
from booster_runtime.checkpoint.save.parts import ModelPart, OptimizerPart

__all__ = ["CheckpointEngine", "CheckpointFiles", "LoadReport", "ModelPart", "OptimizerPart", "WrittenFile"]
