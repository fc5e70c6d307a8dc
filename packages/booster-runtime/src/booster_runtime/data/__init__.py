"""What boost does with data on several ranks: deals out users' loaders, compares batches, gathers values per sample."""

from __future__ import annotations

from booster_runtime.data.first_batch import show_first_batch

__all__ = ["show_first_batch"]
