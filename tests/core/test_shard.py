"""A shard says which part of a tensor it holds, and refuses to say what can't be."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from booster_core.errors import ConfigError
from booster_core.state import TensorShard, box_numel, box_shape, full_box


@st.composite
def boxes(draw):
    """A shape, and a box in it."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3).map(tuple))
    starts = [draw(st.integers(0, size)) for size in shape]
    return shape, tuple((start, draw(st.integers(start, size))) for start, size in zip(starts, shape, strict=True))


def shard(shape, box, data, flat=None, **options):
    return TensorShard(name="w", global_shape=shape, dtype=data.dtype, box=box, data=data, flat=flat, **options)


@given(boxes(), st.data())
def test_a_shard_holds_the_elements_of_its_box_or_a_range_of_them(case, data):
    shape, box = case
    whole = torch.arange(math.prod(shape)).view(shape)
    held = whole[tuple(slice(*span) for span in box)]
    assert box_shape(box) == tuple(held.shape)
    assert box_numel(box) == held.numel()
    assert box_numel(full_box(shape)) == whole.numel()
    assert box_shape(full_box(shape)) == shape
    made = shard(shape, box, held)
    assert (made.numel, made.flat_range) == (held.numel(), (0, held.numel()))
    start = data.draw(st.integers(0, held.numel()))
    stop = data.draw(st.integers(start, held.numel()))
    part = shard(shape, box, held.reshape(-1)[start:stop], (start, stop))
    assert (part.numel, part.flat_range) == (stop - start, (start, stop))


def test_the_key_names_the_state_and_a_shard_is_written_by_its_rank_unless_another_owns_it():
    values = torch.zeros(2)
    assert shard((2,), ((0, 2),), values).key == "w"
    assert shard((2,), ((0, 2),), values).is_owner
    assert shard((2,), ((0, 2),), values, state="exp_avg").key == "w/exp_avg"


@pytest.mark.parametrize(
    ("box", "flat", "data", "message"),
    [
        (((0, 2),), None, (2,), r"Box \(\(0, 2\),\) of 'w' does not fit into a tensor of shape \(2, 3\)"),
        (((-1, 2), (0, 3)), None, (3, 3), "does not fit into a tensor"),
        (((0, 3), (0, 3)), None, (3, 3), "does not fit into a tensor"),
        (((0, 2), (2, 1)), None, (2, 0), "does not fit into a tensor"),
        (((0, 2), (0, 3)), (0, 7), (7,), r"Flat range \(0, 7\) of 'w' does not fit into its box of 6 elements"),
        (((0, 2), (0, 3)), (-1, 2), (3,), "does not fit into its box"),
        (((0, 2), (0, 3)), (3, 2), (0,), "does not fit into its box"),
        (((0, 2), (0, 3)), None, (6,), r"has shape \(6,\); its box and flat range say \(2, 3\)"),
        (((0, 2), (0, 3)), (1, 3), (1,), r"has shape \(1,\); its box and flat range say \(2,\)"),
    ],
)
def test_what_does_not_fit_is_refused(box, flat, data, message):
    with pytest.raises(ConfigError, match=message):
        shard((2, 3), box, torch.zeros(data), flat)


def test_data_of_another_format_are_refused():
    with pytest.raises(ConfigError, match=r"has dtype torch.float64; the shard says torch.float32"):
        TensorShard(
            name="w",
            global_shape=(2,),
            dtype=torch.float32,
            box=((0, 2),),
            data=torch.zeros(2, dtype=torch.float64),
        )
