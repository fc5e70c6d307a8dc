"""Checkpoints: one writer and one reader for every plugin, in the file layouts that others can read."""

from booster_checkpoint.engine import CheckpointEngine
from booster_checkpoint.save.parts import ModelPart, OptimizerPart
from booster_checkpoint.save.plan import WrittenFile
from booster_core.checkpoint_io import LoadReport

__all__ = ["CheckpointEngine", "LoadReport", "ModelPart", "OptimizerPart", "WrittenFile"]
