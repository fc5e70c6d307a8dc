"""How a load goes: finding the files, comparing them with the model, reading each rank's ranges."""

from __future__ import annotations

from booster_checkpoint.load.fill import ShardReader
from booster_checkpoint.load.naming import as_model_names
from booster_checkpoint.load.source import Source, open_source
from booster_core.matching import Expectation, compare

__all__ = ["Expectation", "ShardReader", "Source", "as_model_names", "compare", "open_source"]
