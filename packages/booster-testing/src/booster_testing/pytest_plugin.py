"""End the worker processes together with the test session that started them.

pytest loads this file in every session of an environment with booster-testing, so it imports nothing of ours.
"""

from __future__ import annotations

import sys


def pytest_sessionfinish() -> None:
    """End the worker processes, if a test has started any."""
    pool = sys.modules.get("booster_testing.rank_pool")
    if pool is not None:
        pool.close_ranks()
