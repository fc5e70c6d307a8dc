"""How a load goes: finding the files, comparing them with the model, reading each rank's ranges."""

from __future__ import annotations

from booster_checkpoint.load.compare import Expectation, compare
from booster_checkpoint.load.naming import as_model_names
from booster_checkpoint.load.reader import ShardReader
from booster_checkpoint.load.source import Source, open_source

__all__ = ["Expectation", "ShardReader", "Source", "as_model_names", "compare", "open_source"]
