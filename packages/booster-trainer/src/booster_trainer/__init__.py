"""transformers' ``Trainer``, and trainers that derive from it such as TRL's, under any plugin of a Booster."""

from __future__ import annotations

from booster_trainer.trainer import BoosterTrainer, with_booster

__all__ = ["BoosterTrainer", "with_booster"]
