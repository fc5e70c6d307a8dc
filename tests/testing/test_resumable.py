"""The training that tests kill and resume: it goes on exactly, with the samples that are left."""

from __future__ import annotations

import torch
from resumable import ResumableRun

from booster_testing.compare import EXACT, assert_same_tensors


def test_a_resumed_run_goes_on_exactly(tmp_path):
    whole = ResumableRun(samples=10, seed=1)
    losses = whole.train(7)
    first = ResumableRun(samples=10, seed=1)
    assert first.train(3) == losses[:3]
    first.save(tmp_path)
    other = ResumableRun(samples=10, seed=2)
    assert other.train(1) != losses[:1]
    assert other.load(tmp_path).step == 3
    other.seen = []
    assert other.train(7) == losses[3:]
    assert other.seen == whole.seen[6:]
    assert sorted(whole.seen[:10]) == list(range(10)), "an epoch has each sample once"
    assert_same_tensors(other.tensors(), whole.tensors(), EXACT)


def test_narrow_runs_differ_from_wide_ones():
    narrow, wide = ResumableRun(precision="bf16"), ResumableRun()
    assert narrow.train(2) != wide.train(2)
    assert narrow.tensors().keys() == wide.tensors().keys()
    assert not any(tensor.isnan().any() for tensor in narrow.tensors().values() if torch.is_floating_point(tensor))
