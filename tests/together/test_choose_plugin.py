"""`choose_plugin` takes the fastest plugin that fits, alike on every rank, and its plans leave no trace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from booster_core import Booster, shutdown
from booster_core.errors import ConfigError
from booster_core.plugin import load
from booster_runtime import train_batch
from booster_runtime.lazy import LazyInitContext
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.models import tiny_llama
from booster_tools import choose_plugin
from booster_tools.planning import Candidate, TrainingStep, measure, shares_of
from booster_tools.planning.candidates import candidates

MIB = 2**20
WIDTH = 256
PATIENT = {"timeout_seconds": 240.0, "group_timeout_seconds": 180.0}
"""The other ranks wait while rank 0 plans all settings."""


def mlp():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def pairs():
    values = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(values, values.flip(0)), batch_size=4, shuffle=True)


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def chosen_for(budget, criterion=nn.functional.mse_loss):
    model = mlp()
    return choose_plugin(model, optimizer_of(model), criterion, pairs(), memory_budget_bytes=budget)


def trained(plugin=None, budget=None):
    """Return the plugin, the parameters after an epoch, and the random state before it; `budget` lets it be chosen."""
    torch.manual_seed(7)
    model, loader, criterion = mlp(), pairs(), nn.functional.mse_loss
    optimizer = optimizer_of(model)
    if plugin is None:
        plugin = choose_plugin(model, optimizer, criterion, loader, memory_budget_bytes=budget)
    booster = Booster(plugin=plugin)
    model, optimizer, criterion, loader, _ = booster.boost(model, optimizer, criterion, loader)
    state = torch.get_rng_state()
    for inputs, targets in loader:
        booster.backward(criterion(model(inputs), targets), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    counted = torch.ones(1)
    dist.all_reduce(counted)  # by the process group that there was before
    assert counted.item() == dist.get_world_size()
    shards = [shard.data.detach().clone() for shard in booster.state_adapter(model).model_shards()]
    return plugin, shards, state


def same_as_named(budget):
    """Train with the plugin that is chosen, and again with it named; return its name and options."""
    plugin, shards, state = trained(budget=budget)
    settings = [each for each in candidates(dist.get_world_size()) if each.name == plugin.name]
    (chosen,) = [each for each in settings if each.make().describe() == plugin.describe()]
    _, same_shards, same_state = trained(chosen.make())
    assert all(map(torch.equal, shards, same_shards)), "the plans changed what is trained"
    assert torch.equal(state, same_state)
    return chosen.name, dict(chosen.options)


def test_one_rank_trains_as_under_the_plugin_that_was_chosen():
    run_on_ranks(same_as_named, 1, 64 * MIB, **PATIENT)


def peak_of(plugin, options):
    def build():
        model = mlp()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    share = shares_of(lambda: torch.zeros(8, WIDTH))
    step = TrainingStep(build=build, share=share, criterion=lambda outputs, _: outputs.square().mean())
    return measure(step, load(plugin)(**options)).peak_bytes


def test_two_ranks_train_as_under_the_plugin_that_was_chosen_which_fits_where_replicas_do_not():
    # Parameters, gradients and two moments of 526,592 values in fp32 take 8.0 MiB on every rank.
    budget = 7 * MIB
    (name, options), *others = run_on_ranks(same_as_named, 2, budget, **PATIENT)
    assert others == [(name, options)]
    assert name != "ddp"
    assert max(run_on_ranks(peak_of, 2, name, options)) < budget
    assert min(run_on_ranks(peak_of, 2, "ddp", {})) > budget


def too_small():
    chosen_for(MIB)


def without_loader():
    model = mlp()
    choose_plugin(model, optimizer_of(model), memory_budget_bytes=MIB)


def without_loss():
    chosen_for(64 * MIB, criterion=None)


def boosted_before():
    booster, model = Booster(plugin="ddp"), mlp()
    model, optimizer, *_ = booster.boost(model, optimizer_of(model))
    choose_plugin(model, optimizer, dataloader=pairs(), memory_budget_bytes=MIB)


def no_number_on_one_rank():
    chosen_for("7 MiB" if dist.get_rank() else MIB)


def no_positive_number():
    chosen_for(0)


def other_budgets():
    chosen_for(MIB * (1 + dist.get_rank()))


def unknown_device_on_one_rank():
    model = mlp()
    device = "cpuu" if dist.get_rank() else None
    choose_plugin(model, optimizer_of(model), None, pairs(), memory_budget_bytes=MIB, device=device)


def unknown_precision():
    model = mlp()
    choose_plugin(model, optimizer_of(model), None, pairs(), memory_budget_bytes=MIB, mixed_precision="bf61")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            too_small,
            r"plugin trains this model within `memory_budget_bytes=1048576`.*Nearest is \w+\(.*MiB",
        ),
        (without_loader, "`choose_plugin` .* got no data loader"),
        (without_loss, "could plan no training step.*could not compute a loss as it guessed.*Pass a criterion"),
        (boosted_before, "This `Sequential` is already boosted"),
        (no_number_on_one_rank, "`memory_budget_bytes='7 MiB'` is no positive number of bytes"),
        (no_positive_number, "`memory_budget_bytes=0` is no positive number of bytes"),
        (
            other_budgets,
            "`memory_budget_bytes`: 1048576 on rank 0, 2097152 on rank 1, in `choose_plugin`",
        ),
        (unknown_device_on_one_rank, "`device='cpuu'` is not a device"),
        (unknown_precision, "Unknown precision 'bf61'"),
    ],
)
def test_what_is_missing_is_named_on_every_rank(function, message):
    expect_on_ranks(ConfigError, message, function, 2, **PATIENT)


def lazy_llama():
    with LazyInitContext():
        model = tiny_llama()
    tokens = torch.arange(16 * 8).reshape(16, 8) % 64
    loader = DataLoader([{"input_ids": each, "labels": each} for each in tokens], batch_size=2)
    optimizer = optimizer_of(model)
    plugin = choose_plugin(model, optimizer, dataloader=loader, memory_budget_bytes=512 * MIB, mixed_precision="bf16")
    booster = Booster(mixed_precision="bf16", plugin=plugin)
    model, optimizer, _, loader, _ = booster.boost(model, optimizer, dataloader=loader)
    loss = train_batch(booster, iter(loader), model, None, optimizer)
    return plugin.name, booster.context.precision.name, bool(loss.isfinite())


def test_a_lazy_model_that_computes_its_own_loss():
    found = run_on_ranks(lazy_llama, 2, **PATIENT)
    assert found[0] == found[1]
    assert found[0][1:] == ("bf16", True)


def test_a_group_of_one_is_started_where_nothing_was_launched():
    assert not dist.is_initialized()
    try:
        with mock.patch("booster_tools.planning.choice.candidates", return_value=[Candidate(name="ddp")]):
            assert chosen_for(64 * MIB).name == "ddp"
        assert dist.get_world_size() == 1
    finally:
        shutdown()


SCRIPT = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
from booster_core import Booster, launch_from_torch
from booster_tools import choose_plugin

launch_from_torch()
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(16, 256), torch.randn(16, 256)), batch_size=4)
criterion = torch.nn.functional.mse_loss
booster = Booster(plugin=choose_plugin(model, optimizer, criterion, loader, memory_budget_bytes=7 * 2**20))
model, optimizer, criterion, loader, _ = booster.boost(model, optimizer, criterion, loader)
for inputs, targets in loader:
    loss = criterion(model(inputs), targets)
    booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
booster.save_model(model, sys.argv[1])
booster.context.coordinator.print_on_master("trained under", booster.plugin.name)
"""


@pytest.mark.slow  # the same without a launcher runs by default
def test_a_script_started_by_torchrun(tmp_path):
    script, out = tmp_path / "train.py", Path(tmp_path / "out")
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), str(out)],
        check=False, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    chosen = next(line.split()[2] for line in done.stdout.splitlines() if line.startswith("choose_plugin chose "))
    assert f"trained under {chosen.partition('(')[0]}" in done.stdout
    assert out.exists()
