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


@pytest.mark.parametrize("is_first", [True, False])
def test_requests_and_groups_are_as_many_with_1024_ranks_as_with_16(scale, is_first):
    few, more, many = (scale.launch_and_mesh(0 if is_first else size - 1, size) for size in (16, 64, 1024))
    assert few.num_requests == more.num_requests == many.num_requests <= scale.NUM_REQUESTS
    assert few.num_groups == more.num_groups == many.num_groups == 7
