"""The conformance kit on one replica group, which needs no lighthouse, and on two that train alike."""

import multiprocessing
import os
import pickle
from concurrent.futures import ProcessPoolExecutor
from typing import ClassVar

import pytest
import torch
from kit_cases import by_default
from second_group import on_ranks

from booster_ft import FaultTolerantPlugin
from booster_testing import checkpoint_runs, conformance_runs, run_on_ranks
from booster_testing.conformance import PluginConformance


@by_default("test_equals_one_process[adamw]", "test_clips_by_the_global_norm", "test_no_sync_is_allowed")
class TestOneGroup(PluginConformance):
    plugin_class = FaultTolerantPlugin
    options: ClassVar = {"inner": "ddp"}


@pytest.fixture(scope="class")
def second_group():
    """A process whose ranks are those of the second group, while the test's own are those of the first."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer("[::]:0", 2, join_timeout_ms=10_000, heartbeat_timeout_ms=1000)
    with pytest.MonkeyPatch.context() as patch, ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as second:
        patch.setenv("TORCHFT_LIGHTHOUSE", server.address())
        patch.setenv("NUM_REPLICA_GROUPS", "2")
        patch.setenv("REPLICA_GROUP_ID", "1")
        second.submit(os.getpid).result()
        patch.setenv("REPLICA_GROUP_ID", "0")
        yield second
    server.shutdown()


@by_default("test_equals_one_process[adamw]")
class TestTwoGroups(PluginConformance):
    """Each group is a launch of two ranks, with samples of its own that are those of the other group."""

    plugin_class = FaultTolerantPlugin
    options: ClassVar = {"inner": "ddp", "min_replicas": 2, "timeout_seconds": 10}

    @pytest.fixture(autouse=True)
    def _groups(self, second_group):
        self.second = second_group

    def call(self, function, *of_first, world_size=None):
        of_second = of_first
        if function is checkpoint_runs.save_and_continue:  # each group for itself; all load what the first has saved
            training, root = of_first
            of_second = training, f"{root}-of-the-second"
        settings = {"timeout_seconds": 120.0}
        size = world_size or self.world_size
        other = self.second.submit(on_ranks, function, size, *of_second, **settings)
        try:
            found = run_on_ranks(function, size, *of_first, **settings)
        finally:
            self.of_second = pickle.loads(other.result(150))
        assert_equal(found, self.of_second)
        return found

    def raises(self, error, match, function, *arguments, **changes):
        """Let the second group run too, or the first would wait for it."""
        training = self.training(**changes)
        other = self.second.submit(on_ranks, function, self.world_size, training, *arguments, timeout_seconds=120.0)
        try:
            super().raises(error, match, function, *arguments, **changes)
        finally:
            found = pickle.loads(other.result(150))
        assert isinstance(found, str), "the second group raised nothing"

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
