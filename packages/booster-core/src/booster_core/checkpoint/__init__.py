"""Checkpoints: one writer and one reader for every plugin, in the file layouts that others can read."""

from booster_core.checkpoint.io import CheckpointIO
from booster_core.checkpoint.job import WrittenFile
from booster_core.checkpoint.parts import ModelPart, OptimizerPart
from booster_core.checkpoint.report import LoadReport

__all__ = ["CheckpointIO", "LoadReport", "ModelPart", "OptimizerPart", "WrittenFile"]
