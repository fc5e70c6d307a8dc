"""Checksums tell batches apart, large ones by a sample of their values, and cost little."""

from __future__ import annotations

import pytest
import torch

from booster_hybrid.same_training import checksum_of


def large(seed):
    return {"pixels": torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(seed))}


def test_equal_batches_have_equal_checksums():
    assert checksum_of(large(1), 3) == checksum_of(large(1), 3)


@pytest.mark.parametrize("form", ["contiguous", "transposed", "expanded"])
def test_batches_of_other_values_differ(form):
    first, second = (large(seed)["pixels"] for seed in (1, 2))
    if form == "transposed":
        first, second = first.transpose(0, 3), second.transpose(0, 3)
    if form == "expanded":
        first, second = first[:1].expand(8, -1, -1, -1), second[:1].expand(8, -1, -1, -1)
    assert checksum_of(first) != checksum_of(second)


def test_shapes_and_formats_count():
    numbers = torch.zeros(4, 4)
    assert len({checksum_of(each) for each in (numbers, numbers.view(16), numbers.double())}) == 3


def test_a_difference_in_one_value_of_a_small_tensor_is_seen():
    changed = torch.zeros(64, 64)
    changed[63, 63] = 1
    assert checksum_of(changed) != checksum_of(torch.zeros(64, 64))


def test_every_value_of_a_large_tensor_is_looked_at_in_turn():
    changed = torch.zeros(200, 200)
    changed[123, 45] = 1
    turns = [checksum_of(changed, turn) != checksum_of(torch.zeros(200, 200), turn) for turn in range(5)]
    assert sum(turns) == 1
