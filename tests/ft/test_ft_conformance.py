"""The conformance kit on one replica group, which needs no lighthouse, and on two that train alike."""

import os
import re
from typing import ClassVar

import pytest
import torch
from kit_cases import by_default
from replica_ranks import run_groups

from booster_ft import FaultTolerantPlugin
from booster_testing import RankError, checkpoint_runs, conformance_runs
from booster_testing.conformance import PluginConformance


@by_default("test_equals_one_process[adamw]", "test_clips_by_the_global_norm", "test_no_sync_is_allowed")
class TestOneGroup(PluginConformance):
    plugin_class = FaultTolerantPlugin
    options: ClassVar = {"inner": "ddp"}


def in_group(group, function, arguments):
    """Call a function of the kit in a replica group; the second saves for itself, and all load what the first saved."""
    place = {"REPLICA_GROUP_ID": f"{group.replica_id}", "NUM_REPLICA_GROUPS": f"{group.num_groups}"}
    os.environ.update(place, TORCHFT_LIGHTHOUSE=group.place["lighthouse"])
    if group.replica_id and function is checkpoint_runs.save_and_continue:
        training, root = arguments
        arguments = training, f"{root}-of-the-second"
    return function(*arguments)


@by_default("test_equals_one_process[adamw]")
class TestTwoGroups(PluginConformance):
    """Each group is a launch of two ranks, with samples of its own that are those of the other group."""

    plugin_class = FaultTolerantPlugin
    options: ClassVar = {"inner": "ddp", "min_replicas": 2, "timeout_seconds": 10}

    def call(self, function, *arguments, world_size=None):
        size = world_size or self.world_size
        found = run_groups(in_group, 2, size, function, arguments)
        first, self.of_second = found[:size], found[size:]
        assert_equal(first, self.of_second)
        return first

    def raises(self, error, match, function, *arguments, **changes):
        with pytest.raises(RankError) as caught:
            run_groups(in_group, 2, self.world_size, function, (self.training(**changes), *arguments))
        assert len(caught.value.exceptions) == 2 * self.world_size
        for each in caught.value.exceptions.values():
            assert isinstance(each, error)
            assert re.search(match, str(each))

    def test_plain_data_loader_is_split_between_ranks(self):
        """Between those of both groups."""
        seen = self.on_ranks(conformance_runs.samples_of_a_plain_loader) + self.of_second
        assert sorted(sample for of_rank in seen for sample in of_rank) == list(range(12 * self.world_size))


def assert_equal(one, other):
    """Assert that what two groups return is equal, bit for bit."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_equal(value, other[key])
    elif isinstance(one, (list, tuple)):
        for values in zip(one, other, strict=True):
            assert_equal(*values)
    elif hasattr(one, "__dict__"):
        assert_equal(vars(one), vars(other))
