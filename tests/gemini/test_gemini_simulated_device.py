"""Chunks between a device and its host: equal bits at every placement, what the device holds, and what is moved."""

from collections import Counter
from unittest import mock

import pytest
import simulated_device as sim
import torch
import torch.distributed as dist
from matrix import matrix
from simulated_device import on_devices
from torch import nn

from booster_core import Booster
from booster_gemini import GeminiPlugin
from booster_gemini.memory.chunks import ChunkMemory
from booster_runtime.collectives import Pending

WIDTH, DEPTH = 64, 8
NUMEL = DEPTH * WIDTH * WIDTH
LAYER_BYTES = WIDTH * WIDTH * 4
PLACES = {
    "halves on the host": {"offload_param_frac": 0.5, "offload_optim_frac": 0.5},
    "all on the host": {"offload_param_frac": 1.0, "offload_optim_frac": 1.0},
    "state on the host": {"offload_optim_frac": 1.0},
    "auto": {"placement_policy": "auto", "memory_budget_bytes": 10 * LAYER_BYTES},
    "disk beneath": {"offload_param_frac": 1.0, "offload_optim_frac": 1.0, "offload_dir": True},
    "auto, disk beneath": {
        "placement_policy": "auto",
        "memory_budget_bytes": 10 * LAYER_BYTES,
        "offload_dir": True,
    },
}


def boost(options, precision=None):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    booster = Booster("simulated", precision, GeminiPlugin(min_chunk_bytes=LAYER_BYTES, **options))
    model, optimizer, *_ = booster.boost(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    return booster, model, optimizer


def step(booster, model, optimizer, number=0, *, micro_batches=1, clips=True):
    """Train a step; the second of several backward passes finds gradients that are on their way to the host."""
    for micro in range(micro_batches):
        generator = torch.Generator().manual_seed(100 * number + 10 * micro + dist.get_rank())
        x = torch.randn(4, WIDTH, generator=generator).to(booster.device)
        booster.backward(model(x).float().square().mean(), optimizer)
    norm = float(optimizer.clip_grad_by_norm(0.01)) if clips else 0.0
    optimizer.step()
    optimizer.zero_grad()
    return norm


def with_folder(options, folder):
    return {**options, "offload_dir": str(folder)} if options.get("offload_dir") else options


@matrix(1, place=PLACES, precision=["fp32", "bf16", "fp16"], size=[1, 2])
@on_devices("size")
def test_bits_do_not_depend_on_the_placement(place, precision, size, simulated_device, tmp_path):
    def trained(options):
        run = boost(options, precision)
        # Clipped on their way or not, gradients come to the optimizer without their loss scale.
        norms = [step(*run, number, micro_batches=2, clips=number in (1, 2)) for number in range(4)]
        return norms, {key: value.cpu().clone() for key, value in run[1].state_dict().items()}

    (plain_norms, plain), (norms, state) = trained({}), trained(with_folder(PLACES[place], tmp_path))
    # Taken where gradients are: on the host, rows are summed up in fp32.
    assert norms == pytest.approx(plain_norms, rel=2 * torch.finfo(torch.float32).eps)
    assert all(torch.equal(state[key], value) for key, value in plain.items())


def stepped_twice(options):
    """Step twice from one backward: the second step begins while the first one's values are on their way."""
    booster, model, optimizer = boost(options)
    for number in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number)).to(booster.device)
        booster.backward(model(x).square().mean(), optimizer)
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.cpu().clone() for key, value in model.state_dict().items()}


@on_devices(1)
def test_values_that_are_on_their_way_are_not_stepped_on(simulated_device):
    events, write = [], ChunkMemory.write
    booster, model, optimizer = boost({"offload_optim_frac": 1.0})
    step(booster, model, optimizer)
    stepped = optimizer.optim.step

    def noted(self, buffer, values, **options):
        pending = write(self, buffer, values, **options)
        if values.device.type != "cpu":
            return pending
        number = len(events)
        events.append("sent")
        return Pending([pending], lambda: events.append(f"free {number}"))

    optimizer.optim.step = lambda *args: events.append("step") or stepped(*args)
    with mock.patch.object(ChunkMemory, "write", noted):
        booster.backward(model(torch.randn(4, WIDTH).to(booster.device)).square().mean(), optimizer)
        optimizer.step()
        optimizer.step()
    first = [event for event in events if event in ("step", "sent")][: 2 * DEPTH]
    assert first == ["step", "sent"] * DEPTH, "one layer after the other"
    second = events[2 * DEPTH :]
    assert second == [each for at in range(1, 2 * DEPTH, 2) for each in (f"free {at}", "step", "sent")]


def trained_by_adafactor(options):
    """Train matrices, whose state is not elementwise, and vectors, whose state is and moves with its chunk."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    booster = Booster("simulated", plugin=GeminiPlugin(**options))
    model, optimizer, *_ = booster.boost(net, torch.optim.Adafactor(net.parameters(), lr=0.01))
    for number in range(3):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(number)).to(booster.device)
        booster.backward(model(x).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.cpu().clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("function", "place", "rtol"),
    [
        (stepped_twice, "halves on the host", 0.0),
        (stepped_twice, "all on the host", 0.0),
        (trained_by_adafactor, "all on the host", 1e-6),
    ],
)
@on_devices(1)
def test_steps_on_the_host_are_those_on_the_device(function, place, rtol, simulated_device):
    torch.testing.assert_close(function(PLACES[place]), function({}), rtol=rtol, atol=0.1 * rtol)


@on_devices(1)
def test_a_budget_trains_where_the_device_has_no_room_for_everything(simulated_device):
    budget = 12 * LAYER_BYTES
    limit = budget + 8 * LAYER_BYTES  # and activations, gradients before they are reduced, copies of optimizer kernels
    before = torch.simulated.memory_allocated()

    def peak(options):
        run = boost(options)
        for number in range(4):
            step(*run, number)
            if number == 1:
                torch.simulated.reset_peak_memory_stats()
        return torch.simulated.max_memory_allocated() - before

    assert peak({}) >= 4 * DEPTH * LAYER_BYTES
    with sim.memory_limit(before + limit):
        assert peak({"placement_policy": "auto", "memory_budget_bytes": budget}) <= limit
        with pytest.raises(torch.OutOfMemoryError, match="tried to allocate"):
            peak({})


def moved(options, precision=None):
    """Return what is where between steps, and the bytes that one step moves to the device and to the host."""
    booster, model, optimizer = boost(options, precision)
    for number in range(3):
        step(booster, model, optimizer, number)
    before = sim.bytes_moved()
    step(booster, model, optimizer, 3)
    counted = [after - start for start, after in zip(before, sim.bytes_moved(), strict=True)]
    places = model.gatherer.memory.bytes_by_place()
    return places, counted


@pytest.mark.parametrize("place", ["all on the host", "disk beneath"])
@on_devices(1)
def test_parameters_leave_the_device_in_evaluation_too(place, simulated_device, tmp_path):
    run = booster, model, _ = boost(with_folder(PLACES[place], tmp_path))
    step(*run)  # its plan has what `boost` has done in it, too
    for number in (1, 2):
        step(*run, number)
        for _ in range(3):
            with torch.no_grad():
                model(torch.randn(4, WIDTH).to(booster.device))
            on_device = model.gatherer.memory.bytes_by_place()["simulated"]
            assert on_device <= 4 * LAYER_BYTES, "as many as come ahead"


@on_devices(1)
def test_optimizer_state_on_the_host_is_stepped_there(simulated_device):
    """Gradients go down and new values come up, once; the states of Adam, and a copy of the values, never move."""
    places, (to_device, to_host) = moved({"offload_optim_frac": 1.0})
    assert places == {"simulated": 4 * NUMEL, "cpu": 12 * NUMEL}
    assert to_device == pytest.approx(4 * NUMEL, abs=4096)
    assert to_host == pytest.approx(4 * NUMEL, abs=4096), "gradients"


@on_devices(1)
def test_parameters_on_the_host_come_for_each_use(simulated_device):
    places, (to_device, to_host) = moved({"offload_param_frac": 1.0})
    assert places["cpu"] >= 4 * (NUMEL - 3 * WIDTH * WIDTH)
    assert 4 * NUMEL <= to_device <= 3 * 4 * NUMEL + 4096, "for forward, backward, and the step"
    assert 4 * (NUMEL - 3 * WIDTH * WIDTH) <= to_host <= 4 * NUMEL + 4096, "only what the step has changed"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@on_devices(1)
def test_parameters_and_state_on_the_host_are_updated_there(precision, simulated_device):
    """Of parameters nothing goes down, and nothing comes up but for forward and backward."""
    places, (to_device, to_host) = moved({"offload_param_frac": 1.0, "offload_optim_frac": 1.0}, precision)
    working = 4 if precision == "fp32" else 2
    assert places["cpu"] >= (working + 8) * (NUMEL - 3 * WIDTH * WIDTH)
    assert to_device <= 2 * working * NUMEL + 4096
    assert to_host == pytest.approx(4 * NUMEL, abs=4096), "gradients"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@on_devices(1)
def test_half_of_the_state_is_on_the_host_where_half_was_asked_for(precision, simulated_device):
    """The state grows in the first step, and takes more on the host, where it has a copy of the values."""
    run = boost({"offload_optim_frac": 0.5}, precision)
    for number in range(3):
        step(*run, number)
    found = Counter()
    for state in run[2].state.values():
        found[state["exp_avg"].device.type] += state["exp_avg"].numel()
    assert found == {"cpu": NUMEL // 2, "simulated": NUMEL // 2}


@pytest.mark.parametrize("pins", [True, False])
@on_devices(1)
def test_copies_are_page_locked_only_where_that_is_asked_for_and_in_a_ring(pins, simulated_device):
    counts = []
    run = boost({"offload_optim_frac": 1.0, "pin_memory": pins}, "bf16")
    for number in range(4):
        with mock.patch.object(torch, "empty", wraps=torch.empty) as empty:
            step(*run, number, micro_batches=2)
        counts.append(sum(call.kwargs.get("pin_memory") is True for call in empty.call_args_list))
    assert (counts[0] > 0, counts[-1]) == (pins, 0)
