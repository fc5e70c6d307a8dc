"""Activations on the host: gradients as without, device memory of two calls, and parameters that stay."""

import gc
from functools import partial

import pytest
import simulated_device as sim
import torch
from device_smoke import CASES, STEPS, Run, train_plainly
from matrix import matrix
from simulated_device import NAME, on_devices
from torch import nn

from booster_runtime import enable_activation_checkpointing
from booster_runtime.activations import disable_activation_offload, enable_activation_offload
from booster_testing.compare import EXACT, assert_same_tensors

WIDTH, BATCH, BLOCKS = 64, 4096, 8
ACTIVATION = 4 * WIDTH * BATCH
"""Bytes of what a block gets, and of each of its results: a megabyte."""


class Block(nn.Module):
    """Saves its input and three results, one of them by two operations, and a parameter that it uses by itself."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))

    def forward(self, x):
        inner = torch.tanh(self.up(x))
        return x + self.down(inner * inner) * self.scale * self.shift.exp()


def make_stack(change=None):
    torch.manual_seed(2)
    blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
    blocks[1].requires_grad_(requires_grad=False)
    model = nn.Sequential(*blocks).to(NAME)
    if change is not None:
        change(model)
    return model


def step(model, steps=2):
    """Return gradients, what forward kept on the device, and the peak of forward and backward for all other uses."""
    for _ in range(steps):  # the second finds the first one's stream
        model.zero_grad()
        x = torch.linspace(-1, 1, WIDTH * BATCH).view(BATCH, WIDTH).to(NAME)
        gc.collect()
        before = torch.simulated.memory_allocated()
        torch.simulated.reset_peak_memory_stats()
        loss = model(x).square().mean()
        kept = torch.simulated.memory_allocated() - before
        loss.backward()
        peak = sim.max_memory_active() - before
        del loss
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}, kept, peak


@on_devices(1)
def test_what_modules_save_is_on_the_host_until_backward(simulated_device):
    plain, kept, peak = step(make_stack())
    moved = sim.bytes_moved()
    gradients, kept_here, peak_here = step(make_stack(enable_activation_offload))
    assert_same_tensors(gradients, plain, EXACT)
    to_device, to_host = (after - before for after, before in zip(sim.bytes_moved(), moved, strict=True))
    of_blocks = 4 * (BLOCKS - 1) + 1  # what tanh returns alone of the frozen one
    assert kept > of_blocks * ACTIVATION
    assert kept_here < 9.5 * ACTIVATION, "the last two calls, whose copies may be under way, and the output"
    assert peak_here < min(peak / 2, 14 * ACTIVATION), "what two calls have saved, and what one computes"
    assert to_host // ACTIVATION == 2 * of_blocks, "in two steps, nothing twice"
    assert to_device // ACTIVATION == 2 * of_blocks + 2, "and the inputs of the model"


@on_devices(1)
def test_parameters_that_an_inner_unit_gathers_stay(simulated_device):
    """They are gathered once the module around the unit is running, as sharded strategies do."""

    class Outer(nn.Sequential):
        pass

    def gather(module, _):
        module.weight.data = module.weight.data.clone()

    def outer():
        inner = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        frozen = nn.Linear(4 * WIDTH, WIDTH, bias=False).requires_grad_(requires_grad=False)
        for each in (inner, frozen):
            each.register_forward_pre_hook(gather)
        return Outer(inner, frozen)

    model = nn.Sequential(*(outer() for _ in range(3))).to(NAME)
    enable_activation_offload(model, by=Outer, least_bytes=4 * WIDTH * WIDTH)
    x = torch.ones(8, WIDTH, device=NAME)
    _, before = sim.bytes_moved()
    model(x).sum().backward()
    assert sim.bytes_moved()[1] == before, "what it computes is smaller than the least that is copied"


@on_devices(1)
def test_inputs_of_checkpointed_modules_are_on_the_host(simulated_device):
    plain, *_ = step(make_stack(enable_activation_checkpointing))
    gradients, kept, _ = step(make_stack(partial(enable_activation_checkpointing, offload=True)))
    assert_same_tensors(gradients, plain, EXACT)
    assert kept < 4 * ACTIVATION, "the last two calls' inputs, and the loss"


@on_devices(1)
def test_repeated_dropped_and_restored_calls(simulated_device):
    """Backward twice, a graph that is dropped, an input changed in place, evaluation, and a model that is restored."""
    model = make_stack(enable_activation_offload)
    x = torch.ones(BATCH, WIDTH, device=NAME)
    before = torch.simulated.memory_allocated()
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    first = model[0].up.weight.grad.clone()
    loss.backward()
    assert_same_tensors({"twice": model[0].up.weight.grad}, {"twice": 2 * first}, EXACT)
    model(x)  # no backward
    with torch.no_grad():
        moved = sim.bytes_moved()
        model(x)
        assert sim.bytes_moved() == moved
    model.zero_grad()
    out = model[0](x)
    out.mul_(3)  # the next module saves it, this one doesn't
    moved = sim.bytes_moved()
    model[2](out).sum().backward()
    assert sim.bytes_moved() != moved
    disable_activation_offload(model)
    moved = sim.bytes_moved()
    model(x).sum().backward()
    assert sim.bytes_moved() == moved
    del loss, out, first
    model.zero_grad()
    gc.collect()
    assert torch.simulated.memory_allocated() <= before


PLUGINS = ("ddp", "fsdp", "zero 2", "gemini", "gemini, offload", "tensor parallel", "pipeline")


CHANGES = {
    "offload": partial(enable_activation_offload, by="LlamaDecoderLayer", least_bytes=64),
    "keep": partial(enable_activation_checkpointing, by="LlamaDecoderLayer", keep="expensive"),
    "inputs": partial(enable_activation_checkpointing, by="LlamaDecoderLayer", offload=True),
}


@matrix(["gemini-offload"], 1, name=PLUGINS, change=CHANGES)
@on_devices(lambda name: CASES[name].world_size, timeout_seconds=240.0, group_timeout_seconds=120.0)
def test_plugins_train_with_activations_elsewhere(name, change, simulated_device):
    """Layers keep on the host whatever is longer than a row."""
    expected, _ = train_plainly(NAME)
    run = Run(CASES[name], NAME, "fp32")
    assert CHANGES[change](run.model)
    assert [run.step(number) for number in range(STEPS)] == pytest.approx(expected, rel=1e-5)
