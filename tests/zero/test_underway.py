"""Reductions that are underway borrow memory, and give it back to later ones."""

from types import SimpleNamespace
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from booster_zero.engine.reducer import InflightReductions


def test_memory_of_a_reduction_that_has_ended_is_lent_again():
    sizes = [3, 2, 1, 3, 2, 1]
    format_ = SimpleNamespace(wire=torch.float32)
    buckets = [mock.Mock(awaits_average=False, scratch_numel=numel, format=format_) for numel in sizes]
    underway = InflightReductions(buckets)
    for bucket in buckets:
        underway.start(bucket, {})
        underway.wait_until(1)
    lent = [bucket.start_reduction.call_args.args[1] for bucket in buckets]
    assert all(each.numel() >= numel for each, numel in zip(lent, sizes, strict=True))
    assert lent[0].data_ptr() != lent[1].data_ptr()  # both are underway
    assert len({each.data_ptr() for each in lent}) == 3, "no more than are underway at once, and one that was too small"
    underway.wait_until(0)
    kept = [StorageWeakRef(each.untyped_storage()) for each in lent]
    for bucket in buckets:
        bucket.reset_mock()
    lent.clear()
    assert not all(storage.expired() for storage in kept)
    underway.give_back()
    assert all(storage.expired() for storage in kept)
