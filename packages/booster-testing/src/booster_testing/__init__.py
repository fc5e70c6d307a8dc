"""Test Booster plugins: the conformance kit, test functions on several ranks, and peaks of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_testing.memory import peak_memory
from booster_testing.rank_pool import RankDiedError, RankError, RankTimeoutError, close_ranks
from booster_testing.ranks import Ranks, expect_on_ranks, open_ranks, run_on_ranks

if TYPE_CHECKING:
    from booster_testing.conformance import PluginConformance
    from booster_testing.pipeline_conformance import PipelineConformance

__all__ = [
    "PipelineConformance",
    "PluginConformance",
    "RankDiedError",
    "RankError",
    "RankTimeoutError",
    "Ranks",
    "close_ranks",
    "expect_on_ranks",
    "open_ranks",
    "peak_memory",
    "run_on_ranks",
]


def __getattr__(name: str) -> object:
    """Import the kit on first use: worker processes import this package, too, and don't need pytest."""
    if name == "PluginConformance":
        from booster_testing.conformance import PluginConformance

        return PluginConformance
    if name == "PipelineConformance":
        from booster_testing.pipeline_conformance import PipelineConformance

        return PipelineConformance
    msg = f"module 'booster_testing' has no attribute '{name}'"
    raise AttributeError(msg)
