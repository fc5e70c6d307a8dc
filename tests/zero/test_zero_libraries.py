"""Optimizers of other libraries, which need whole parameters, against the same in one process."""

import importlib

import pytest
import torch
import torch.distributed as dist
from isolated_libraries import FOLDER, import_quietly, missing_libraries, use_isolated_libraries
from matrix import matrix
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_zero import LowLevelZeroPlugin

OPTIMIZERS = {
    "lamb": ("timm.optim", "Lamb", {"lr": 0.02, "weight_decay": 0.1, "max_grad_norm": None}),
    "came": ("came_pytorch", "CAME", {"lr": 0.01, "weight_decay": 0.1}),
    "transformers' adafactor": ("transformers", "Adafactor", {"lr": 0.01, "relative_step": False}),
}
STEPS, SAMPLES = 4, 3
pytestmark = pytest.mark.usefixtures("ranks_with_isolated_libraries")


def make(name, **changes):
    """Return a small model and an optimizer of a library over it, in two groups."""
    home, kind, settings = OPTIMIZERS[name]
    use_isolated_libraries()
    import_quietly([home])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    groups = [{"params": list(model[:3].parameters())}, {"params": list(model[3:].parameters()), "lr": 0.003}]
    return model, getattr(importlib.import_module(home), kind)(groups, **{**settings, **changes})


def loss_of(model, step, samples):
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(12, size, generator=generator)[samples] for size in (6, 3))
    return (model(x) - y).square().mean()


def plainly(name):
    model, optimizer = make(name)
    for step in range(STEPS):
        loss_of(model, step, slice(0, 12)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters()}


def boosted(name, options, changes=None):
    model, optimizer = make(name, **(changes or {}))
    net = model
    booster = Booster(plugin=LowLevelZeroPlugin(bucket_bytes=128, **options))
    model, optimizer, *_ = booster.boost(model, optimizer)
    for step in range(STEPS):
        booster.backward(loss_of(model, step, slice(dist.get_rank(), None, dist.get_world_size())), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    owned = sum(parameter.numel() for parameter in optimizer.state)
    return {n: p.detach().clone() for n, p in net.named_parameters()}, owned


@matrix(["3-options1-came"], **{"world_size, options": [(2, {"stage": 1}), (3, {"stage": 2})]}, name=list(OPTIMIZERS))
def test_parameters_equal_one_process(name, world_size, options):
    if missing := missing_libraries([OPTIMIZERS[name][0].partition(".")[0]]):
        pytest.skip(f"{missing[0]} not installed, neither as usual nor in {FOLDER}")
    (expected,) = run_on_ranks(plainly, 1, name, timeout_seconds=120)
    results = run_on_ranks(boosted, world_size, name, options, timeout_seconds=120)
    for actual, _ in results:
        assert_same_tensors(actual, expected, tolerance_for(torch.float32))
    owned = [numel for _, numel in results]
    assert sum(owned) == sum(parameter.numel() for parameter in expected.values())
    assert max(owned) <= {2: 80, 3: 72}[world_size], "as even as whole parameters can be dealt out"


def test_a_norm_over_all_parameters_is_refused_with_the_way_out():
    if missing_libraries(["timm"]):
        pytest.skip(f"timm not installed, neither as usual nor in {FOLDER}")
    expect_on_ranks(
        ConfigError,
        r"Lamb lets one parameter influence the update of another.* let the plugin clip \(`max_norm`\)",
        boosted,
        2,
        "lamb",
        {},
        {"max_grad_norm": 1e-3},
        timeout_seconds=120,
    )
