"""What a plan computes: small tensors have their values, and what comes from large ones is zero."""

import pytest
import torch

from booster_core.errors import ConfigError
from booster_tools.planning.recorder import StepRecorder


@pytest.fixture
def planned():
    return StepRecorder(computes=False, is_alone=True)


@pytest.fixture
def part(planned):
    """Return a small part of a large tensor of a plan, whose memory has leftovers in it."""
    with planned:
        large = torch.ones(1 << 16, dtype=torch.long)
    large.numpy().fill(7)
    with planned:
        return large[3:103]


def test_small_tensors_have_their_values(planned):
    with planned:
        assert (torch.arange(100) + 1).sum().item() == 5050
        ids = torch.zeros(100, dtype=torch.long)
        ids.copy_(torch.arange(100))
        assert ids[50].item() == 50


def test_a_part_of_a_large_tensor_is_zero_wherever_it_is_read(planned, part):
    with planned:
        assert part[5].item() == 0
        assert [int(each) for each in torch.aminmax(part)] == [0, 0]
        assert part.clone()[5].item() == 0
        assert (part + 1)[5].item() == 0
        assert torch.equal(part, part)


def test_what_is_copied_from_a_part_of_a_large_tensor_is_zero(planned, part):
    with planned:
        ids = torch.arange(100)
        ids.copy_(part)
        assert ids.sum().item() == 0


def test_shapes_that_depend_on_a_part_of_a_large_tensor_are_refused(planned, part):
    with planned, pytest.raises(ConfigError, match="its argument has no values in a plan"):
        part.nonzero()


def test_results_of_the_same_arguments_have_their_own_shapes(planned):
    with planned:
        large = torch.ones(300, 200)
        assert torch.cat([large, large]).shape == (600, 200)
        assert torch.cat([large, large], 1).shape == (300, 400)
        assert torch.cat([large, large, large]).shape == (900, 200)
        assert (large + large.t().contiguous().t()).stride() == (200, 1)
        values, indices = large.max(1)
        assert (values.shape, indices.dtype) == ((300,), torch.long)
        assert large.sum().item() == 0
