"""End the worker processes together with the test session that started them, and let the kit's asserts show values.

pytest loads this file in every session of an environment with booster-testing, so it imports nothing of ours.
"""

from __future__ import annotations

import sys

import pytest

_WITH_ASSERTS = (
    "checkpoint_conformance",
    "checkpoint_runs",
    "conformance",
    "conformance_runs",
    "pipeline_conformance",
    "pipeline_runs",
    "training",
)
# pytest 8.0 finds these by itself only where the package is installed from a wheel, later ones in an editable one too.
pytest.register_assert_rewrite(*(f"booster_testing.{name}" for name in _WITH_ASSERTS))


def pytest_sessionfinish() -> None:
    """End the worker processes, if a test has started any."""
    pool = sys.modules.get("booster_testing.rank_pool")
    if pool is not None:
        pool.close_ranks()
