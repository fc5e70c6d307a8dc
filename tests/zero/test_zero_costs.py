"""What a step costs: bytes moved, bytes kept, and that nothing grows."""

import contextlib
import gc
import inspect
import re
import threading
import weakref
from collections import defaultdict
from types import FunctionType
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from matrix import matrix
from ranked import on_ranks
from torch import nn

from booster_core import Booster
from booster_runtime import collectives
from booster_testing import peak_memory
from booster_zero import LowLevelZeroPlugin

COMMUNICATING = re.compile("gather|reduce|scatter|broadcast|send|recv|all_to_all|barrier|new_group")
"""Names of functions of torch.distributed by which ranks talk to each other, in whichever version of torch."""

FLAG_BYTES = 3 + 16
"""A byte for each parameter says whether any rank used it; the rest compares settings of the optimizer's groups."""


def make(width, depth=3):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))


def boost(model, **options):
    booster = Booster(plugin=LowLevelZeroPlugin(**options))
    return booster, *booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))[:2]


def train(booster, model, optimizer, width, no_sync=False):
    with booster.no_sync(model) if no_sync else contextlib.nullcontext():
        booster.backward(model(torch.ones(1, width)).square().mean(), optimizer)
    if not no_sync:
        optimizer.step()
        optimizer.zero_grad()


def handed_over(micro_batches, stage):
    """Return the bytes that this rank hands to functions of torch by which ranks talk, by name and tag, in one step."""
    handed = defaultdict(lambda: defaultdict(int))

    def counting(name, function):
        def call(*args, **kwargs):
            given = inspect.signature(function).bind(*args, **kwargs).arguments
            tensor = given.get("tensor")
            nbytes = tensor.numel() * tensor.element_size() if isinstance(tensor, torch.Tensor) else -1
            handed[name][given.get("tag")] += nbytes
            return function(*args, **kwargs)

        return call

    booster, model, optimizer = boost(make(64), stage=stage, bucket_bytes=20000)
    train(booster, model, optimizer, 64)
    with pytest.MonkeyPatch.context() as patch:
        for name, function in list(vars(dist).items()):
            # Not `isinstance`: torch's deprecated objects warn when asked for their class.
            if COMMUNICATING.search(name) and type(function) is FunctionType:
                patch.setattr(dist, name, counting(name, function))
        for micro in range(micro_batches):
            train(booster, model, optimizer, 64, no_sync=micro < micro_batches - 1)
    return {name: list(by_tag.values()) for name, by_tag in handed.items()}


@matrix(["1-2"], stage=[1, 2], world_size=[2, 4])
@on_ranks("world_size")
def test_a_step_sends_as_many_bytes_as_an_all_reduce(world_size, stage):
    one_way = 3 * 64 * 64 * 4 * (world_size - 1) // world_size
    # Three tags: slices of gradients, flags (to every other rank), new parameters.
    moved = [one_way, FLAG_BYTES * (world_size - 1), one_way]
    assert handed_over(1, stage) == {"isend": moved, "irecv": moved}


@pytest.mark.parametrize(("stage", "reductions"), [(1, 1), (2, 3)])
@on_ranks(2)
def test_stage_1_moves_gradients_once_however_many_micro_batches(stage, reductions):
    assert handed_over(3, stage)["isend"][0] == reductions * 3 * 64 * 64 * 4 // 2


@pytest.mark.parametrize(
    ("world_size", "stage", "most_underway", "kept"),
    [
        (2, 2, 3 / 12, (0.0, 0.5)),  # of twelve layers, each a bucket, two are underway and one is on its way
        (2, 1, 0.0, (1.0, 0.5)),
        (1, 1, 0.0, (0.0, 1.0)),
        (1, 2, 0.0, (0.0, 1.0)),
    ],
)
@on_ranks("world_size")
def test_stage_2_never_holds_a_whole_gradient_and_one_rank_holds_each_once(world_size, stage, most_underway, kept):
    booster, model, optimizer = boost(make(256, 12), stage=stage, bucket_bytes=256 * 256 * 4)
    train(booster, model, optimizer, 256)
    model_bytes = 12 * 256 * 256 * 4
    original, refs, peaks = collectives.reduce_scatter, [], []

    def underway():
        return sum(part.numel() * 4 for part in (ref() for ref in refs) if part is not None)

    def counting(parts, *args, **kwargs):
        refs.extend(weakref.ref(part) for _, part in parts)
        peaks.append(underway())
        return original(parts, *args, **kwargs)

    with mock.patch.object(collectives, "reduce_scatter", counting):
        for _ in range(2):
            train(booster, model, optimizer, 256, no_sync=True)
    full = sum(p.grad.numel() * 4 for p in model.unwrap().parameters() if type(p.grad) is torch.Tensor)  # no stand-in
    shards = sum(bucket.gradient.numel() * 4 for bucket in optimizer.layout.buckets)
    assert max(peaks, default=0) <= most_underway * model_bytes
    assert ((full + underway()) / model_bytes, shards / model_bytes) == kept


@on_ranks(2)
def test_all_is_freed_with_the_last_reference():
    booster, model, optimizer = boost(make(8))
    train(booster, model, optimizer, 8)
    kept = [
        optimizer.engine,
        *optimizer.layout.buckets,
        *(piece.values for piece in optimizer.layout.pieces().values()),
    ]
    held = [weakref.ref(each) for each in kept]
    gc.disable()  # `del` is enough
    try:
        del booster, model, optimizer, kept
        assert [type(ref()).__name__ for ref in held if ref() is not None] == []
    finally:
        gc.enable()


@pytest.mark.slow
@on_ranks(2, timeout_seconds=120)
def test_nothing_grows_in_a_thousand_steps():
    booster, model, optimizer = boost(make(64), bucket_bytes=20_000, stage=2)
    for _ in range(300):  # malloc finds its final size
        train(booster, model, optimizer, 64)

    def count():
        hooks = sum(len(p._post_accumulate_grad_hooks) for p in model.unwrap().parameters())
        return hooks, threading.active_count(), len(optimizer.state)

    before = count()
    with peak_memory() as used:
        for _ in range(1000):
            train(booster, model, optimizer, 64)
    assert count() == before
    kept_bytes = used.kept_bytes
    # A single gradient of one layer kept in each step would be 16 MiB; malloc and gloo settle within two.
    assert kept_bytes < 2**22
