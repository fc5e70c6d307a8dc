"""Offload where forward runs on a device: what is there, what is moved, and that copies and steps take turns."""

import contextlib
import math
from dataclasses import replace
from unittest import mock

import pytest
import simulated_device as sim
import torch
import torch.distributed as dist
from gathering_plugin import GatheringPlugin
from host_waits import HostWaits
from matrix import matrix
from simulated_device import Rates, on_devices
from torch import nn

from booster_core import Booster
from booster_runtime import collectives
from booster_runtime.memory import CopyStream
from booster_zero import LowLevelZeroPlugin
from booster_zero.engine.bucket import Bucket

WIDTH, DEPTH = 64, 8
NUMEL = DEPTH * WIDTH * WIDTH
KINDS = {
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "muon": lambda params: torch.optim.Muon(params, lr=0.02),
}


def boost(options, precision=None, name="fused"):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    booster = Booster("simulated", precision, LowLevelZeroPlugin(**{"bucket_bytes": 2 * WIDTH * WIDTH * 4, **options}))
    model, optimizer, *_ = booster.boost(net, KINDS[name](list(net.parameters())))
    return booster, model, optimizer


def step(booster, model, optimizer, number=0, micro_batches=1):
    for micro in range(micro_batches):
        generator = torch.Generator().manual_seed(100 * number + 10 * micro + dist.get_rank())
        x = torch.randn(4, WIDTH, generator=generator).to(booster.device)
        booster.backward(model(x).float().square().mean(), optimizer)
    optimizer.clip_grad_by_norm(0.5)
    optimizer.step()
    optimizer.zero_grad()


def trained(options, precision, name):
    run = boost(options, precision, name)
    for number in range(4):
        step(*run, number, micro_batches=2)
    return {key: value.cpu().clone() for key, value in run[1].state_dict().items()}


def clamped(options):
    booster, model, optimizer = boost(options, "bf16")
    for number in range(4):
        step(booster, model, optimizer, number)
        if number % 2:
            for parameter in [*model.parameters()][number :: DEPTH // 2]:
                parameter.data.clamp_(-0.02, 0.02)
    return {key: value.cpu().clone() for key, value in model.state_dict().items()}


def gathered(options):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    booster = Booster("simulated", None, GatheringPlugin(chunk_bytes=2 * WIDTH * WIDTH * 4, **options))
    model, optimizer, *_ = booster.boost(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    for number in range(3):
        step(booster, model, optimizer, number, micro_batches=2)
    return {key: value.cpu().clone() for key, value in model.state_dict().items()}


OFFLOADED = {
    "bf16": (trained, 2, {"stage": 2}, "bf16", "fused"),
    "fp32": (trained, 2, {"stage": 2}, "fp32", "fused"),
    "fp16": (trained, 2, {"stage": 2}, "fp16", "fused"),
    "replicas": (trained, 4, {"stage": 2, "replica_size": 2}, "bf16", "fused"),
    "whole parameters, adafactor": (trained, 2, {}, "bf16", "adafactor"),
    "whole parameters, muon": (trained, 2, {}, "bf16", "muon"),
    "values that a script has written": (clamped, 2, {}),
    "gathered for each use": (gathered, 2, {}),
}


@matrix([name for name in OFFLOADED if name not in ("fp32", "fp16")], name=OFFLOADED)
@on_devices(lambda name: OFFLOADED[name][1])
def test_offload_from_a_device_changes_no_bit(name, simulated_device):
    function, _, options, *given = OFFLOADED[name]
    plain = function(options, *given)
    offloaded = function({**options, "offload": True if function is gathered else "cpu"}, *given)
    assert all(torch.equal(plain[key], value) for key, value in offloaded.items())


@on_devices(2)
def test_what_is_sent_stays_until_it_is_summed_also_by_a_rank_that_owns_nothing_of_it(simulated_device):
    owned, events = [], []
    record, start = CopyStream.record, Bucket._start_sum_below

    def recorded(stream):
        events.append(mock.Mock(wraps=record(stream)))
        return events[-1]

    def started(bucket, *args):
        pending = start(bucket, *args)
        for event in events:
            event.reset_mock()
        pending.wait()
        assert [call for event in events for call in event.method_calls] == [mock.call.wait()], "the stream waits"
        owned.append(bucket.numel > 0)
        return pending

    recording = mock.patch.object(CopyStream, "record", recorded)
    with recording, mock.patch.object(Bucket, "_start_sum_below", started):
        options = {"offload": "cpu", "bucket_bytes": WIDTH * WIDTH * 4}  # a parameter a bucket
        step(*boost(options, name="adafactor"))
    assert {*owned} == {True, False}


@matrix(1, **{"precision, working": [("fp32", 4), ("bf16", 2)]})
@on_devices(2)
def test_the_device_keeps_working_values_alone(precision, working, simulated_device):
    def costs(options):
        """Return the bytes that a device keeps after a step, holds at most in one, and moves in one."""
        before = torch.simulated.memory_allocated()
        run = boost(options, precision)
        for number in range(2):
            step(*run, number)
        moved = sim.bytes_moved()
        torch.simulated.reset_peak_memory_stats()
        step(*run)
        moved = [after - start for start, after in zip(moved, sim.bytes_moved(), strict=True)]
        peak = torch.simulated.max_memory_allocated() - before
        return torch.simulated.memory_allocated() - before, peak, moved

    share, masters = NUMEL // 2, 4 if precision == "bf16" else 0
    bucket = 2 * WIDTH * WIDTH * 4
    kept, peak, (to_device, to_host) = costs({"offload": "cpu"})
    assert kept == pytest.approx(NUMEL * working, abs=2000)
    # Underway: gradients of three buckets, joined and summed, and activations.
    assert peak < kept + 3 * 3 * bucket
    assert to_device == pytest.approx(share * working, abs=8 * WIDTH * 4), "values, in the format of forward"
    assert to_host == pytest.approx(share * 4, abs=1000), "sums of gradients, once"
    assert costs({})[0] >= NUMEL * working + share * (8 + 4 + masters)


@on_devices(2)
def test_a_bucket_goes_back_while_the_next_one_is_stepped(simulated_device):
    def order_of_events(options):
        run = boost(options)
        step(*run)
        events, gather, stepped = [], collectives.all_gather, run[2].optim.step
        run[2].optim.step = lambda *args: events.append("step") or stepped(*args)
        with mock.patch.object(collectives, "all_gather", lambda *args: events.append("gather") or gather(*args)):
            step(*run)
        assert len(run[2].layout.buckets) == DEPTH // 2
        return events

    assert order_of_events({"offload": "cpu"}) == ["step", "gather"] * (DEPTH // 2)
    assert order_of_events({}) == ["step"] + ["gather"] * (DEPTH // 2)


ROWS = 512
LAYER_BYTES = WIDTH * WIDTH * 4
# A layer's forward takes twice as long as a copy of its gradient.
RATES = Rates(flops=ROWS * WIDTH * WIDTH, memory_bytes=100.0 * LAYER_BYTES, link_bytes=1.0 * LAYER_BYTES)


@pytest.mark.parametrize("micro_batches", [1, 2])
@on_devices(1)
def test_gradients_go_down_and_add_up_while_backward_runs(micro_batches, simulated_device):
    def timed(rates):
        """Return how long backwards take and copies in them, in a step after one whose backwards wait for nothing."""
        booster, model, optimizer = boost({"offload": "cpu", "stage": 2, "bucket_bytes": LAYER_BYTES})
        x = torch.randn(ROWS, WIDTH).to(booster.device)
        spent, waits = [0.0, 0.0], HostWaits("simulated")
        for number in range(5):
            if number == 4:
                torch.simulated.synchronize()
                sim.start_timeline(rates)
            for _ in range(micro_batches):
                loss = model(x).square().mean()
                begin = sim.times()
                with waits if number == 3 else contextlib.nullcontext():
                    booster.backward(loss, optimizer)
                if number == 4:
                    spent = [sum(each) - before for *each, before in zip(spent, sim.times(), begin, strict=True)]
            optimizer.step()
            optimizer.zero_grad()
        assert waits.found == []
        return spent

    seconds, copying = timed(RATES)
    least, _ = timed(replace(RATES, link_bytes=math.inf))
    assert copying >= 0.9 * DEPTH
    assert 1 - (seconds - least) / copying >= 0.8, "hidden"
