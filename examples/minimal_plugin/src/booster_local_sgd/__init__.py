"""Local SGD as a Booster plugin: ranks train independently and average their parameters every few steps."""

from __future__ import annotations

from booster_local_sgd.plugin import LocalSGDPlugin

__all__ = ["LocalSGDPlugin"]
