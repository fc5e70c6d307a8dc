"""`choose_plugin` takes the fastest plugin that fits, alike on every rank, and its plans leave no trace."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranked import on_ranks
from torch import nn

from booster_core import Booster, shutdown
from booster_core.errors import ConfigError
from booster_core.plugin import load
from booster_core.ranks import DistCoordinator
from booster_runtime import train_batch
from booster_testing import expect_on_ranks
from booster_tools import TrainingFunctions, choose_plugin
from booster_tools.planning import Candidate, TrainingStep, measure, shares_of
from booster_tools.planning.candidates import candidates

MIB = 2**20
WIDTH = 256
PATIENT = {"timeout_seconds": 240.0, "group_timeout_seconds": 180.0}
"""The other ranks wait while rank 0 plans all settings."""


def mlp():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def samples():
    values = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    return {"input": values, "target": values.flip(0)}


def built():
    model = mlp()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(outputs, batch):
    return nn.functional.mse_loss(outputs, batch["target"])


MLP = TrainingFunctions(built, samples, loss_of)


def trained(plugin=None, budget=None):
    """Return the plugin, the parameters after some steps, and the random state before; `budget` lets it be chosen."""
    torch.manual_seed(7)
    plugin = choose_plugin(MLP, memory_budget_bytes=budget) if plugin is None else plugin
    state = torch.get_rng_state()
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(*built())
    for _ in range(3):
        train_batch(booster, iter([samples()]), model, loss_of, optimizer)
    counted = torch.ones(1)
    dist.all_reduce(counted)  # by the process group that there was before
    assert counted.item() == dist.get_world_size()
    shards = [shard.data.detach().clone() for shard in booster.state_adapter(model).model_shards()]
    return plugin, shards, state


@on_ranks(2, **PATIENT)
def test_two_ranks_train_as_under_the_plugin_that_was_chosen_which_fits_where_replicas_do_not():
    # Parameters, gradients and two moments of 526,592 values in fp32 take 8.0 MiB on every rank.
    budget = 7 * MIB
    plugin, shards, state = trained(budget=budget)
    settings = [each for each in candidates(dist.get_world_size()) if each.name == plugin.name]
    (chosen,) = [each for each in settings if each.make().describe() == plugin.describe()]
    _, same_shards, same_state = trained(chosen.make())
    assert all(map(torch.equal, shards, same_shards)), "the plans changed what is trained"
    assert torch.equal(state, same_state)
    assert plugin.name != "ddp"
    first, other = DistCoordinator().all_gather_object((chosen.name, dict(chosen.options)))
    assert first == other
    step = TrainingStep(build=built, share=shares_of(samples), criterion=loss_of)
    assert measure(step, chosen.make()).peak_bytes < budget < measure(step, load("ddp")()).peak_bytes


def refused(budgets, last=None, functions=MLP, **options):
    """Choose with other arguments on each rank; ``last`` are those of the last one besides."""
    of_rank = last if last and dist.get_rank() else {}
    given = {"functions": functions, "memory_budget_bytes": budgets[dist.get_rank()], **options, **of_rank}
    choose_plugin(given.pop("functions"), **given)


@pytest.mark.parametrize(
    ("budgets", "options", "message"),
    [
        ([MIB] * 2, {}, r"plugin trains this model within `memory_budget_bytes=1048576`.*Nearest is \w+\(.*MiB"),
        ([64 * MIB] * 2, {"functions": TrainingFunctions(built, samples)}, "could plan no training step.*loss"),
        ([MIB, "7 MiB"], {}, "`memory_budget_bytes='7 MiB'` is no positive number of bytes"),
        ([0] * 2, {}, "`memory_budget_bytes=0` is no positive number of bytes"),
        ([MIB, 2 * MIB], {}, "`memory_budget_bytes`: 1048576 on rank 0, 2097152 on rank 1, in `choose_plugin`"),
        ([MIB] * 2, {"last": {"device": "cpuu"}}, "`device='cpuu'` is not a device"),
        ([MIB] * 2, {"mixed_precision": "bf61"}, "Unknown precision 'bf61'"),
    ],
    ids=["too small", "no loss", "no number", "no positive number", "other budgets", "device", "precision"],
)
def test_what_is_missing_is_named_on_every_rank(budgets, options, message):
    expect_on_ranks(ConfigError, message, refused, 2, budgets, **options, **PATIENT)


def test_objects_in_the_place_of_functions_are_refused_on_every_rank():
    message = r"takes `TrainingFunctions\(.*got `Sequential`"
    expect_on_ranks(TypeError, message, refused, 2, [64 * MIB] * 2, {"functions": mlp()}, **PATIENT)


def test_a_group_of_one_is_started_where_nothing_was_launched():
    assert not dist.is_initialized()
    try:
        with mock.patch("booster_tools.planning.choice.candidates", return_value=[Candidate(name="ddp")]):
            assert choose_plugin(MLP, memory_budget_bytes=64 * MIB).name == "ddp"
        assert dist.get_world_size() == 1
    finally:
        shutdown()
