"""Replicas and shards are the rows and columns of one grid: each rank is in one of each, and they cross in one rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from booster_core.errors import ConfigError
from booster_runtime.sharding.ranks import sharding_groups


@given(st.integers(1, 6), st.integers(1, 6))
def test_replicas_and_shards_are_a_grid(replica_size, shard_size):
    world_size = replica_size * shard_size
    replicas, shards = sharding_groups(world_size, replica_size)
    assert [len(replica) for replica in replicas] == [shard_size] * replica_size
    assert [len(holders) for holders in shards] == [replica_size] * shard_size
    assert sorted(rank for replica in replicas for rank in replica) == list(range(world_size))
    for number, replica in enumerate(replicas):
        for index, rank in enumerate(replica):
            assert shards[index][number] == rank == number * shard_size + index, "replicas are consecutive ranks"


def test_a_number_of_replicas_that_does_not_divide_is_refused_with_those_that_do():
    with pytest.raises(ConfigError, match=r"does not divide the world size 6\. Use one of 1, 2, 3, 6\."):
        sharding_groups(6, 4)
