"""Shards of the slow run: each selected test runs in exactly one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from shards import Shard


def split(count, number):
    """Return the tests that each shard runs, and those that it leaves to others."""
    run, left = [], []
    for shard in range(1, count + 1):
        items, deselected = list(range(number)), []
        hook = SimpleNamespace(pytest_deselected=lambda items, into=deselected: into.extend(items))
        Shard(f"{shard}/{count}").pytest_collection_modifyitems(SimpleNamespace(hook=hook), items)
        run.append(items)
        left.append(deselected)
    return run, left


@pytest.mark.parametrize(("count", "number"), [(1, 5), (3, 10), (8, 8), (8, 3)])
def test_shards_have_each_test_once(count, number):
    run, left = split(count, number)
    assert sorted(item for part in run for item in part) == list(range(number))
    assert {len(part) for part in run} <= {number // count, number // count + 1}
    assert all(sorted(run[place] + left[place]) == list(range(number)) for place in range(count))


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "x/3", ""])
def test_shards_out_of_range_are_refused(text):
    with pytest.raises(pytest.UsageError, match=r"pass the shard and the number of shards"):
        Shard(text)
