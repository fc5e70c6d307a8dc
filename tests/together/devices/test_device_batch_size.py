"""`find_batch_size` on simulated devices with little memory."""

import gc

import device_smoke
import pytest
import simulated_device as sim
import torch
from device_smoke import CASES
from matrix import matrix
from simulated_device import NAME, on_devices

from booster_core.errors import BudgetError, ConfigError
from booster_core.ranks import DistCoordinator
from booster_runtime.data import move_batch
from booster_tools import TrainingFunctions, find_batch_size

START, FITTING, LENGTH = 24, 6, 48


def build():
    torch.rand(1)
    model = device_smoke.make_model()
    return model, device_smoke.make_optimizer(model)


def batch(samples):
    tokens = torch.randint(64, (samples, LENGTH))
    return {"input_ids": tokens, "labels": tokens}


FUNCTIONS = TrainingFunctions(build, batch)


def backward(booster, model, optimizer, batch):
    loss = model(**batch).loss
    booster.backward(loss, optimizer)
    return loss.detach()


def step(booster, model, optimizer, batch):
    loss = backward(booster, model, optimizer, batch)
    optimizer.clip_grad_by_norm(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train(booster, size):
    """Return the losses, own shards and next random number of a training, and the device's memory at its peak."""
    torch.simulated.reset_peak_memory_stats()
    torch.manual_seed(5)
    model, optimizer, *_ = booster.boost(*build())
    losses = []
    for _ in range(3):
        with booster.no_sync(model, optimizer):
            losses.append(backward(booster, model, optimizer, move_batch(batch(size), booster.device)))
        losses.append(step(booster, model, optimizer, move_batch(batch(size), booster.device)))
    peak = torch.simulated.max_memory_allocated()
    shards = optimizer.stepped()
    return [each.detach().to("cpu", copy=True) for each in (*losses, *shards, torch.rand(1))], peak


@matrix(
    ["fsdp", "zero 2", "gemini"],
    name=["ddp", "fsdp", "zero 1", "zero 2", "gemini", "tensor parallel", "sequence parallel"],
)
@on_devices(2)
def test_the_size_that_fits_is_found_and_leaves_no_trace(name, simulated_device):
    """The last rank's memory is just enough for `FITTING`; compare trainings before and after."""
    case = CASES[name]
    expected, peak = train(case.make_booster(NAME), FITTING)
    booster = case.make_booster(NAME)
    plugin, last = dict(vars(booster.plugin)), DistCoordinator().rank == 1
    torch.manual_seed(7)
    gc.collect()  # what the training before left
    before = torch.get_rng_state(), torch.simulated.memory_allocated(), torch.is_grad_enabled()
    with sim.memory_limit(int(1.1 * peak) if last else 1 << 34):
        assert find_batch_size(FUNCTIONS, START, booster=booster) == (FITTING, START // FITTING)
    after = torch.get_rng_state(), torch.simulated.memory_allocated(), torch.is_grad_enabled()
    assert before[0].equal(after[0])
    assert before[1:] == after[1:]
    assert vars(booster.plugin) == plugin
    actual, _ = train(booster, FITTING)
    assert len(actual) == len(expected) >= 8
    assert all(a.equal(b) for a, b in zip(actual, expected, strict=True))


def fail(*arguments):
    if DistCoordinator().rank == 1:
        msg = "tokens"
        raise KeyError(msg)
    step(*arguments)


def look(booster, model, optimizer, batch):
    model(**batch)


@pytest.mark.parametrize(
    ("name", "error", "message", "options"),
    [
        ("pipeline", ConfigError, "'hybrid' has a pipeline", {}),
        ("fsdp, offload", ConfigError, "cpu_offload=True", {}),
        (
            "ddp",
            BudgetError,
            r"of one sample does not fit into the memory of rank 0: .* out of memory",
            {"limit": 1000},
        ),
        ("ddp", KeyError, "tokens", {"own_step": fail}),
        ("ddp", ConfigError, "took no optimizer step", {"own_step": look}),
        ("ddp", ConfigError, "`start=0`", {"start": 0}),
        ("ddp", TypeError, "got `float`", {"start": 2.0}),
    ],
)
@on_devices(2)
def test_what_cannot_be_tried_is_refused_on_every_rank(name, error, message, options, simulated_device):
    options = {"limit": 1 << 34, "start": START, "own_step": step, **options}
    booster = CASES[name].make_booster(NAME)
    with pytest.raises(error, match=message), sim.memory_limit(options["limit"]):
        find_batch_size(FUNCTIONS, options["start"], booster=booster, step=options["own_step"])


@on_devices(2)
def test_memory_that_a_library_lacks_is_lacking_too(simulated_device):
    def fail_in_a_library(booster, model, optimizer, batch):
        if len(batch["labels"]) > 12 and DistCoordinator().rank == 1:
            msg = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            raise RuntimeError(msg)
        step(booster, model, optimizer, batch)

    booster = CASES["ddp"].make_booster(NAME)
    assert find_batch_size(FUNCTIONS, START, booster=booster, step=fail_in_a_library) == (12, 2)


@on_devices(2)
def test_values_that_mean_nothing_skip_no_step_under_a_loss_scale(simulated_device):
    sizes = []

    def overflow(booster, model, optimizer, batch):
        booster.backward(model(**batch).loss * float("nan"), optimizer)
        optimizer.step()
        sizes.append(len(optimizer.state))
        optimizer.zero_grad()

    booster = CASES["zero 1"].make_booster(NAME, "fp16")
    assert find_batch_size(FUNCTIONS, START, booster=booster, step=overflow) == (START, 1)
    assert min(sizes) > 0
