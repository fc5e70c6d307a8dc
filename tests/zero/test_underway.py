"""Reductions that are underway borrow memory, and give it back to later ones."""

from types import SimpleNamespace

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from booster_zero.engine.reducer import InflightReductions


class FakeBucket:
    """A bucket whose reduction is over when it is waited for, and that keeps what it was lent."""

    awaits_average = False
    format = SimpleNamespace(wire=torch.float32)

    def __init__(self, numel):
        self.scratch_numel, self.lent = numel, []

    def start_reduction(self, gradients, scratch):
        self.lent.append(scratch)
        return SimpleNamespace(wait=lambda: None)


def test_memory_of_a_reduction_that_has_ended_is_lent_again():
    sizes = [3, 2, 1, 3, 2, 1]
    buckets = [FakeBucket(numel) for numel in sizes]
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
