"""A budget that nobody gives is what the first step leaves of the device's memory."""

import pytest
import simulated_device as sim
import torch
import torch.distributed as dist
from matrix import matrix
from simulated_device import run_on_devices
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError, OffloadError
from booster_gemini import GeminiPlugin
from booster_testing import run_on_ranks

WIDTH, DEPTH, BATCH = 64, 16, 512
LAYER_BYTES = WIDTH * WIDTH * 4
STATE_BYTES = 4 * DEPTH * LAYER_BYTES
ACTIVATION_BYTES = BATCH * WIDTH * 4
AUTO = {"placement_policy": "auto"}


def boost(options, precision=None, chunk_bytes=LAYER_BYTES):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    booster = Booster("simulated", precision, GeminiPlugin(min_chunk_bytes=chunk_bytes, **options))
    model, optimizer, *_ = booster.boost(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    return booster, model, optimizer


def step(booster, model, optimizer, number, batch=BATCH):
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    x = torch.randn(batch, WIDTH, generator=generator).to(booster.device)
    loss = model(x).float().square().mean()
    booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def trained(options, limit, precision=None, batch=BATCH):
    """Return losses, the peak of later steps, what is where between steps, and the budget."""
    before = torch.simulated.memory_allocated()
    with sim.memory_limit(before + limit):
        booster, model, optimizer = boost(options, precision)
        losses = [step(booster, model, optimizer, number, batch) for number in range(2)]
        torch.simulated.reset_peak_memory_stats()
        losses += [step(booster, model, optimizer, number, batch) for number in range(2, 5)]
        peak = torch.simulated.max_memory_allocated() - before
    memory = model.gatherer.memory
    if not memory.moves:
        return losses, peak, None, None
    places, budget = memory.bytes_by_place(), memory.tiers[0].budget_bytes
    memory.close()
    return losses, peak, places, budget


def out_of_memory(options, limit, precision):
    with pytest.raises(torch.OutOfMemoryError):
        trained(options, limit, precision)


@matrix(["bf16-2"], precision=["fp32", "bf16"], size=[1, 2])
def test_activations_have_room(precision, size, simulated_device):
    """Where everything together does not fit, blocks get what is left, and losses are the same bits."""
    most = 1 << 30
    plain, peak, *_ = run_on_devices(trained, size, simulated_device, {}, most, precision)[0]
    limit = peak - STATE_BYTES // (8 * size)
    run_on_devices(out_of_memory, size, simulated_device, {}, limit, precision)
    losses, found, places, budget = run_on_devices(trained, size, simulated_device, AUTO, limit, precision)[0]
    assert losses == plain
    assert found <= limit
    assert places["cpu"] > 0, "not everything fits"
    assert places["simulated"] > 0, "but something does"
    assert budget < limit - ACTIVATION_BYTES * DEPTH * (1 if precision == "fp32" else 0.5)


def retries(limit):
    """Return how often the allocator had to give memory back to the device in later steps, to go on."""
    torch.simulated.empty_cache()
    with sim.memory_limit(torch.simulated.memory_allocated() + limit):
        run = boost(AUTO, chunk_bytes=4 * LAYER_BYTES)
        for number in range(2):
            step(*run, number, BATCH // 16)
        before = torch.simulated.memory_stats()["num_alloc_retries"]
        for number in range(2, 6):
            step(*run, number, BATCH // 16)
        found = torch.simulated.memory_stats()["num_alloc_retries"] - before
    memory = run[1].gatherer.memory
    places, budget = memory.bytes_by_place(), memory.tiers[0].budget_bytes
    memory.close()
    return found, places, budget


@pytest.mark.parametrize("limit", [52, 60, 100])
def test_pools_of_blocks_and_of_all_else_have_room_together(limit, simulated_device):
    """What one stream's pool keeps for later, no other can use: an allocator that runs out stops the device."""
    for found, places, budget in run_on_devices(retries, 2, simulated_device, limit * LAYER_BYTES):
        assert places["simulated"] > 0
        if limit == 100:  # values and Adam's state, and no copy of values from when the host stepped
            assert places == {"simulated": 3 * DEPTH * LAYER_BYTES // 2, "cpu": 0}
        else:
            assert places["cpu"] > 0
        assert 0 < budget < limit * LAYER_BYTES
        assert found == 0


def test_everything_stays_where_it_fits(simulated_device):
    """Also what had no place on the device in the first step, before activations were known."""
    limit = 2 * STATE_BYTES
    assert limit / 5 < STATE_BYTES / 2, "the first step is to offload optimizer state"
    ((_, _, places, budget),) = run_on_devices(trained, 1, simulated_device, AUTO, limit, "fp32", BATCH // 8)
    assert budget > STATE_BYTES
    assert places["cpu"] == 0


def test_state_returns_from_the_disk_where_it_fits(simulated_device, tmp_path):
    options = {**AUTO, "offload_dir": str(tmp_path), "host_budget_bytes": 2 * LAYER_BYTES}
    limit, batch = 2 * STATE_BYTES, BATCH // 8
    ((expected, *_),) = run_on_devices(trained, 1, simulated_device, {}, 1 << 30, "fp32", batch)
    ((losses, _, places, _),) = run_on_devices(trained, 1, simulated_device, options, limit, "fp32", batch)
    assert losses == expected
    assert places["disk"] == 0


def budgets_of_unequal_ranks():
    batch = BATCH // 4 if dist.get_rank() == 0 else BATCH
    return trained(AUTO, 8 * STATE_BYTES, "fp32", batch)[3]


def test_ranks_agree_on_the_least(simulated_device):
    first, second = run_on_devices(budgets_of_unequal_ranks, 2, simulated_device)
    assert first == second
    assert second < 0.9 * 8 * STATE_BYTES - ACTIVATION_BYTES * DEPTH


def refused():
    with pytest.raises(ConfigError, match=r"found \d+ bytes left by activations .* smaller batches"):
        retries(44 * LAYER_BYTES)  # of which activations leave 11, and chunks of 4 layers need 14
    return True


def test_activations_that_leave_too_little_are_refused_on_every_rank(simulated_device):
    assert run_on_devices(refused, 2, simulated_device) == [True, True]


def begun(folder):
    with sim.memory_limit(torch.simulated.memory_allocated() + 2 * STATE_BYTES):
        booster, model, optimizer = boost(AUTO)
        step(booster, model, optimizer, 0, BATCH // 8)
        booster.save_checkpoint(folder, step=1, model=model, optimizer=optimizer)
        losses = [step(booster, model, optimizer, number, BATCH // 8) for number in range(1, 5)]
    model.gatherer.memory.close()
    return losses


def resumed(folder):
    with sim.memory_limit(torch.simulated.memory_allocated() + 2 * STATE_BYTES):
        booster, model, optimizer = boost(AUTO)
        booster.load_checkpoint(folder, model=model, optimizer=optimizer)
        loaded = model.gatherer.memory.bytes_by_place()
        losses = [step(booster, model, optimizer, number, BATCH // 8) for number in range(1, 5)]
    places = model.gatherer.memory.bytes_by_place()
    model.gatherer.memory.close()
    return losses, loaded, places


def test_loaded_state_goes_to_the_device_where_it_fits(simulated_device, tmp_path):
    (expected,) = run_on_devices(begun, 1, simulated_device, tmp_path)
    ((found, loaded, places),) = run_on_devices(resumed, 1, simulated_device, tmp_path)
    assert found == expected
    assert loaded["cpu"] > 0, "loaded before activations were known"
    assert places["cpu"] == 0


def on_a_host():
    net = nn.Linear(4, 4)
    plugin = GeminiPlugin(placement_policy="auto", offload_dir="unused")
    with pytest.raises(ConfigError, match=r"'cpu' does not tell .* Pass `memory_budget_bytes`"):
        Booster("cpu", plugin=plugin).boost(net, torch.optim.AdamW(net.parameters()))
    return True


def test_a_device_that_does_not_tell_its_memory_is_refused_on_every_rank():
    assert run_on_ranks(on_a_host, 2) == [True, True]


def failing_to_read(folder):
    options = {**AUTO, "offload_dir": folder, "host_budget_bytes": 2 * LAYER_BYTES}
    with sim.memory_limit(torch.simulated.memory_allocated() + 2 * STATE_BYTES):
        run = boost(options)
        memory = run[1].gatherer.memory

        def raise_block(block):
            msg = "the disk can't be read"
            raise OffloadError(msg)

        if dist.get_rank() == 1:
            memory._raise = raise_block
        with pytest.raises(OffloadError, match="the disk can't be read"):
            step(*run, 0, BATCH // 8)
    memory.close()
    return True


def test_a_disk_that_fails_when_state_returns_is_told_on_every_rank(simulated_device, tmp_path):
    assert run_on_devices(failing_to_read, 2, simulated_device, str(tmp_path)) == [True, True]


def budget_of_a_fraction(options, limit, fraction):
    """Return the budget where the process may take a part of the device."""
    torch.simulated.get_per_process_memory_fraction = lambda _: fraction
    try:
        return trained(options, limit)[3]
    finally:
        del torch.simulated.get_per_process_memory_fraction


def test_a_process_takes_no_more_of_the_device_than_it_may(simulated_device):
    limit = 8 * STATE_BYTES
    (whole,) = run_on_devices(budget_of_a_fraction, 1, simulated_device, AUTO, limit, 1.0)
    (half,) = run_on_devices(budget_of_a_fraction, 1, simulated_device, AUTO, limit, 0.5)
    assert whole - half == pytest.approx(0.9 * limit / 2, rel=0.01), "but for a tenth"
