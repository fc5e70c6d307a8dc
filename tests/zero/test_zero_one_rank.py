"""Where one rank has the whole gradient, each parameter's is added to it as it comes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from booster_runtime.sharding.ranks import ShardingRanks
from booster_zero.engine import Bucket, Format, Layout, Memory
from booster_zero.engine.reducer import Reducer
from booster_zero.engine.stand_ins import ShardedGradient

CPU = torch.device("cpu")


def reduced(dtype=torch.float32, bucket_bytes=2**20):
    """Return three parameters, their layout on one rank, and its reducer."""
    format_ = Format(working=dtype, master=torch.float32, wire=dtype, device=CPU, step_device=CPU, is_trained=True)
    parameters = {index: nn.Parameter(torch.ones(3, 5, dtype=dtype)) for index in range(3)}
    layout = Layout(
        nn.ParameterList(parameters.values()),
        ShardingRanks(shard_group=None, shard_rank=0, shard_size=1),
        lambda *arguments: Bucket(*arguments, memory=Memory()),
        bucket_bytes=bucket_bytes,
    )
    layout.add(parameters, dict.fromkeys(parameters, format_))
    reducer = Reducer(
        layout.buckets, {index: str(index) for index in range(3)}, overlap=True, agree_on_record=lambda *_: set()
    )
    return parameters, layout, reducer


def run(reducer, parameters, factors, *, is_paused=False):
    """Take one backward in which each parameter's gradient is its factor."""
    reducer.is_paused = is_paused
    with reducer.guarded():
        sum((parameters[index].float() * factor).sum() for index, factor in factors.items()).backward()
    reducer.is_paused = False


def gradients(layout):
    return [layout.bucket_of(index).gradient_of(piece)[0, 0].item() for index, piece in sorted(layout.pieces().items())]


@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
def test_nothing_of_an_earlier_step_is_left_where_a_parameter_is_unused(bucket_bytes):
    parameters, layout, reducer = reduced(bucket_bytes=bucket_bytes)
    run(reducer, parameters, {0: 1.0, 1: 2.0, 2: 3.0})
    assert gradients(layout) == [1.0, 2.0, 3.0]
    reducer.clear()
    run(reducer, parameters, {1: 5.0})
    assert gradients(layout) == [0.0, 5.0, 0.0]
    assert reducer.used == {1}


def test_rounds_add_up():
    parameters, layout, reducer = reduced()
    run(reducer, parameters, {0: 1.0, 1: 2.0})
    run(reducer, parameters, {1: 3.0, 2: 4.0})
    assert gradients(layout) == [1.0, 5.0, 4.0]


def test_gradients_of_a_pause_are_added_at_once():
    parameters, layout, reducer = reduced()
    run(reducer, parameters, {0: 1.0}, is_paused=True)
    assert isinstance(parameters[0].grad, ShardedGradient), "no values"
    assert parameters[1].grad is None
    run(reducer, parameters, {0: 2.0, 1: 4.0}, is_paused=True)
    reducer.settle()
    assert gradients(layout) == [3.0, 4.0, 0.0]
    assert reducer.num_rounds == 1


def test_gradients_that_were_set_to_zero_are_added_to():
    parameters, layout, reducer = reduced()
    run(reducer, parameters, {0: 1.0, 1: 2.0})
    reducer.zero()
    run(reducer, parameters, {1: 3.0})
    assert gradients(layout) == [0.0, 3.0, 0.0]


def test_narrow_gradients_add_up_in_the_format_of_the_masters():
    parameters, layout, reducer = reduced(torch.bfloat16)
    run(reducer, parameters, {0: 256.0}, is_paused=True)
    run(reducer, parameters, {0: 1.0})
    assert gradients(layout)[0] == 257.0  # which bf16 has not
