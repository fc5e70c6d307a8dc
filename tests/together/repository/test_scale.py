"""What a launch and a mesh cost a rank does not grow with the number of ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def scale(monkeypatch):
    """Return the script that plays one rank of many."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import _scale

    yield _scale
    del sys.modules["_scale"]


def test_requests_and_groups_are_as_many_with_1024_ranks_as_with_64(scale):
    few, many = [], []
    for size, costs in ((64, few), (1024, many)):
        said = []
        costs += [scale.launch_and_boost(rank, size, said) for rank in (0, size - 1)]
    assert [each.num_requests for each in few] == [each.num_requests for each in many]
    assert max(each.num_groups for each in (*few, *many)) <= 11, "of axes and products of them, not of ranks"
    assert max(each.num_requests for each in many) <= scale.NUM_REQUESTS
