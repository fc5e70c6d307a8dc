"""Accumulated steps under every plugin are those of large batches, also at the end of an epoch."""

import pytest
import torch
from accumulation_runs import PER_BATCH, STEPS, make_data, make_model, mse, train_plainly
from named_plugins import plugin_named
from torch.utils.data import DataLoader, TensorDataset

from booster_core import Booster
from booster_runtime import accumulate, gathered, reduce
from booster_testing import run_on_ranks


def _accumulated(plugin):
    booster, model = Booster(plugin=plugin_named(plugin)), make_model()
    _, size = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    loader = DataLoader(TensorDataset(*make_data()), batch_size=PER_BATCH // size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer, _, loader, _ = booster.boost(model, optimizer, dataloader=loader)
    num_steps = 0
    for _ in range(2):
        for x, y in loader:
            with accumulate(booster, model, STEPS, loader) as is_last:
                booster.backward(mse(model(x), y), optimizer)
            if is_last:
                num_steps += 1
                optimizer.step()
                optimizer.zero_grad()
    with gathered(booster, model, [name for name, _ in make_model().named_parameters()]) as tensors:
        return num_steps, {name: value.detach().clone() for name, value in tensors.items()}


@pytest.mark.parametrize("plugin", ["ddp", "zero", "fsdp", pytest.param("gemini", marks=pytest.mark.slow), "hybrid"])
def test_accumulated_steps_are_those_of_large_batches_also_at_an_end_of_an_epoch(plugin):
    expected = train_plainly()
    for num_steps, found in run_on_ranks(_accumulated, 2, plugin):
        assert num_steps == 6
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def _reduced(plugin):
    booster = Booster(plugin=plugin_named(plugin))
    coordinator = booster.context.coordinator
    index, size = booster.plugin.data_parallel_coordinates(coordinator)
    values = {"loss": torch.tensor([1.0, 3.0]) * (index + 1), "hits": index + 3, "seen": (torch.tensor(2 + index),)}
    if plugin == "hybrid-pp" and coordinator.rank == 0:
        values = None  # a stage without outputs
    means, sums = reduce(booster, values), reduce(booster, values, "sum")
    return size, means["loss"].tolist(), means["seen"][0].item(), sums["hits"].item(), sums["seen"][0].item()


@pytest.mark.parametrize("plugin", ["zero", "hybrid-tp", "hybrid-pp"])
def test_values_of_each_data_parallel_rank_are_reduced_once(plugin):
    expected = (2, [1.5, 4.5], 2.5, 7, 5) if plugin == "zero" else (1, [1.0, 3.0], 2.0, 3, 2)
    assert run_on_ranks(_reduced, 2, plugin) == [expected] * 2
