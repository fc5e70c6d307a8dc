"""Optimizers of other libraries, which need whole parameters, against the same in one process."""

import importlib
from functools import partial

import pytest
import torch
from cases import Case, Setting, assert_same_training, train_boosted, train_plainly
from isolated_libraries import FOLDER, import_quietly, missing_libraries, use_isolated_libraries
from matrix import matrix
from torch import nn

from booster_testing import run_on_ranks
from booster_zero import LowLevelZeroPlugin

OPTIMIZERS = {
    "lamb": ("timm.optim", "Lamb", {"lr": 0.02, "weight_decay": 0.1, "max_grad_norm": None}),
    "came": ("came_pytorch", "CAME", {"lr": 0.01, "weight_decay": 0.1}),
    "transformers' adafactor": ("transformers", "Adafactor", {"lr": 0.01, "relative_step": False}),
}
pytestmark = pytest.mark.usefixtures("ranks_with_isolated_libraries")


class Inputs(nn.Module):
    def forward(self, x):
        return x[:, :6]


def net():
    return nn.Sequential(Inputs(), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def make_optimizer(name, changes, model):
    """Return an optimizer of a library over a model, in two groups."""
    home, kind, settings = OPTIMIZERS[name]
    use_isolated_libraries()
    import_quietly([home])
    groups = [{"params": list(model[:4].parameters())}, {"params": list(model[4:].parameters()), "lr": 0.003}]
    return getattr(importlib.import_module(home), kind)(groups, **{**settings, **changes})


def rows(number, replica):
    """Return four rows of six inputs and three targets."""
    return torch.randn(4, 9, generator=torch.Generator().manual_seed(10 * number + replica))


def squares(outputs, batch):
    return (outputs - batch[:, 6:]).square().mean()


def case_of(name, **changes):
    optimizer = partial(make_optimizer, name, changes)
    return Case(build=net, batch=rows, loss=squares, optimizer=optimizer, steps=4, max_norm=None)


def setting_of(world_size, **options):
    return Setting(LowLevelZeroPlugin, {"bucket_bytes": 128, **options}, world_size)


def count_owned(_booster, _model, optimizer):
    return sum(parameter.numel() for parameter in optimizer.state)


@matrix(["3-options1-came"], **{"world_size, options": [(2, {"stage": 1}), (3, {"stage": 2})]}, name=list(OPTIMIZERS))
def test_parameters_equal_one_process(name, world_size, options):
    if missing := missing_libraries([OPTIMIZERS[name][0].partition(".")[0]]):
        pytest.skip(f"{missing[0]} not installed, neither as usual nor in {FOLDER}")
    case, setting = case_of(name), setting_of(world_size, **options)
    (expected,) = run_on_ranks(train_plainly, 1, case, world_size, timeout_seconds=120)  # libraries are for ranks only
    results = run_on_ranks(train_boosted, world_size, case, setting, count_owned, timeout_seconds=120)
    for result in results:
        assert_same_training(result.trained, expected, case)
    owned = [result.told for result in results]
    assert sum(owned) == sum(parameter.numel() for parameter in expected.parameters.values())
    assert max(owned) <= {2: 80, 3: 72}[world_size], "as even as whole parameters can be dealt out"
