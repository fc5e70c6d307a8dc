"""Tools for testing Booster and its plugins: functions run on several ranks, and limits and peaks of memory."""

from booster_core.testing.memory import data_limit, peak_memory
from booster_core.testing.rank_pool import RankDiedError, RankError, RankTimeoutError, close_ranks
from booster_core.testing.ranks import expect_on_ranks, run_on_ranks

__all__ = [
    "RankDiedError",
    "RankError",
    "RankTimeoutError",
    "close_ranks",
    "data_limit",
    "expect_on_ranks",
    "peak_memory",
    "run_on_ranks",
]
