"""Reductions that are underway borrow memory, and give it back to later ones."""

from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from booster_zero.engine.reducer import InflightReductions


class FakeBucket:
    """A bucket whose reduction and average are started and waited for by hand."""

    def __init__(self, name, log, wire=torch.float32, numel=4):
        self.name, self.log = name, log
        self.format = SimpleNamespace(wire=wire)
        self.scratch_numel = numel
        self.awaits_average = True
        self.lent = []

    def start_reduction(self, gradients, scratch):
        self.lent.append(scratch)
        self.log.append(f"reduce {self.name}")
        return SimpleNamespace(wait=lambda: self.log.append(f"reduced {self.name}"))

    def start_average(self):
        self.log.append(f"average {self.name}")
        return SimpleNamespace(wait=lambda: self.log.append(f"averaged {self.name}"))


def test_memory_of_a_reduction_that_has_ended_is_lent_again():
    sizes = [3, 2, 1, 3, 2, 1]
    buckets = [FakeBucket(str(number), [], numel=numel) for number, numel in enumerate(sizes)]
    underway = InflightReductions(buckets)
    for bucket in buckets:
        underway.start(bucket, {})
        underway.wait_until(1)
    lent = [bucket.lent[0] for bucket in buckets]
    assert all(each.numel() >= numel for each, numel in zip(lent, sizes, strict=True))
    assert lent[0].data_ptr() != lent[1].data_ptr()  # both are underway
    assert len({each.data_ptr() for each in lent}) == 3, "no more than are underway at once, and one that was too small"
    underway.wait_until(0)
    kept = [StorageWeakRef(each.untyped_storage()) for each in lent]
    for bucket in buckets:
        bucket.lent.clear()
    lent.clear()
    assert not all(storage.expired() for storage in kept)
    underway.give_back()
    assert all(storage.expired() for storage in kept)


@pytest.mark.parametrize("averages", [True, False])
def test_the_oldest_are_waited_for_first_and_then_averaged(averages):
    log = []
    buckets = [FakeBucket(name, log) for name in "abc"]
    underway = InflightReductions(buckets)
    underway.averages = averages
    for bucket in buckets:
        underway.start(bucket, {})
    log.clear()
    underway.wait_until(1)
    assert log == (
        ["reduced a", "average a", "reduced b", "average b", "averaged a"] if averages else ["reduced a", "reduced b"]
    )
    log.clear()
    underway.wait_until(0)
    assert log == (["reduced c", "average c", "averaged b", "averaged c"] if averages else ["reduced c"])
