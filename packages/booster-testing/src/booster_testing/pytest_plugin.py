"""Ends the warm ranks with the test session that started them.

pytest loads this file in every session of an environment that has booster-testing, so it imports nothing itself.
"""

from __future__ import annotations

import sys


def pytest_sessionfinish() -> None:
    """End the ranks, if a test has started any."""
    pool = sys.modules.get("booster_testing.rank_pool")
    if pool is not None:
        pool.close_ranks()
