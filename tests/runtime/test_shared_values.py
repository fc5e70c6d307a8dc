"""Ranks begin with the first rank's values, send buffers that forward changed, and name what took no part."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranked import on_ranks, raises_on_ranks
from torch import nn

from booster_core.errors import GradientError
from booster_core.ranks import observed_by
from booster_runtime.sharding import (
    BufferWatch,
    RanksOfWorld,
    agree_on_values,
    describe_reductions,
    note_reductions,
    raise_for_unused,
    ranks,
)
from booster_testing import run_on_ranks


class Mixed(nn.Module):
    """Has values of several types and strides."""

    def __init__(self, seed):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(3, 4, generator=draw).t())
        self.register_buffer("mask", torch.rand(5, generator=draw) > 0.5)
        self.register_buffer("count", torch.tensor(seed))
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        self.count += 1
        return self.norm(x)


@on_ranks(2)
def test_every_rank_begins_with_the_first_ranks_values():
    model = Mixed(dist.get_rank())
    strides = model.weight.stride()
    agree_on_values(model)
    expected = Mixed(0)
    assert model.weight.stride() == strides
    found = [torch.equal(value, expected.state_dict()[name]) for name, value in model.state_dict().items()]
    assert found
    assert all(found)


@pytest.mark.parametrize(("message_bytes", "least", "most"), [(32 << 20, 3, 3), (1000, 10, 40), (1, 202, 203)])
@on_ranks(2)
def test_small_values_travel_together(message_bytes, least, most):
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(*(nn.BatchNorm2d(3 + index) for index in range(40)), nn.Linear(50, 50).double())
    for norm in model[:40]:
        norm.running_mean.normal_()
        nn.init.normal_(norm.weight)
    with torch.inference_mode():
        model.register_buffer("cache", torch.randn(3))
    calls = []

    def during(call):
        calls.extend([call] if call.payload_bytes else [])  # not when it is waited for
        return contextlib.nullcontext()

    # Put back at the end: later tests run in this process, and with others that keep the usual length.
    with mock.patch.object(ranks, "_MESSAGE_BYTES", message_bytes), observed_by(SimpleNamespace(during=during)):
        agree_on_values(model)
    assert least <= len(calls) <= most, len(calls)
    found = [None, None]
    dist.all_gather_object(found, [each.tolist() for each in (*model.parameters(), *model.buffers())])
    assert found[0] == found[1]


@on_ranks(2)
def test_buffers_that_forward_changed_are_sent():
    model = Mixed(0)
    watch = BufferWatch(model)

    def names_of(changed):
        return [name for name, is_changed in zip(watch.buffers(), changed, strict=True) if is_changed]

    assert names_of(watch.changed()) == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    model.eval()
    watch.forget()
    assert names_of(watch.changed()) == []
    for _ in range(1 + dist.get_rank()):
        model(torch.ones(4, 2))
    changed = watch.changed()
    assert names_of(changed) == ["count"]
    watch.send_changed(changed)
    watch.send_changed([False] * len(changed))
    assert int(model.count) == 1
    model.mask = ~model.mask  # another tensor
    assert names_of(watch.changed()) == ["mask"]


@raises_on_ranks(GradientError, r"rank 1: 'layers\.0', .*'layers\.9', \.\.\.\. Freeze them", 2)
def test_unused_parameters_are_named_for_each_rank():
    raise_for_unused([])
    raise_for_unused([f"layers.{index}" for index in range(12)] if dist.get_rank() else [])


@on_ranks(4)
def test_ranks_of_two_replicas_know_their_place():
    made = RanksOfWorld(2)
    found = made.get()
    assert made.get() is found, "groups are made once"
    replica, shard = divmod(dist.get_rank(), 2)
    assert (found.shard_rank, found.shard_size, found.replica_rank) == (shard, 2, replica)
    assert dist.get_process_group_ranks(found.gathering) == [2 * replica, 2 * replica + 1]
    assert dist.get_process_group_ranks(found.replica_group) == [shard, shard + 2]
    alone = RanksOfWorld(1).get()
    assert (alone.gathering, alone.shard_size) == (None, 4)


def describe(by_backend, is_rounded):
    model = nn.Linear(2, 2)
    sent = [torch.bfloat16, torch.float32, torch.bfloat16]
    note_reductions(model, sent, torch.device("cpu"), by_backend=by_backend, is_rounded=is_rounded)
    return describe_reductions([model, nn.Linear(2, 2), model])


@pytest.mark.parametrize(
    ("by_backend", "is_rounded", "narrow"),
    [
        (False, False, "sent in bf16, summed in fp32 in rank order"),
        (False, True, "sent in bf16, summed in fp32 in rank order, and rounded to bf16"),
        (True, False, "sent in bf16, summed in bf16 by gloo"),
    ],
)
def test_formats_of_sums_are_described(by_backend, is_rounded, narrow):
    wide = f"sent in fp32, summed in fp32 {'by gloo' if by_backend else 'in rank order'}"
    lines = [f"reduction  gradients are {text}" for text in (wide, narrow)]
    assert run_on_ranks(describe, 2, by_backend, is_rounded) == [lines] * 2
    assert run_on_ranks(describe, 1, by_backend, is_rounded) == [[]]
