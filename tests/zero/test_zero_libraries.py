"""Optimizers of other libraries, which need whole parameters, against the same in one process."""

import importlib

import pytest
import torch.distributed as dist
from cases import Case, Setting, assert_same_training, noise, train_boosted, train_plainly
from isolated_libraries import FOLDER, import_quietly, missing_libraries, use_isolated_libraries
from matrix import matrix
from ranked import on_ranks
from torch import nn

from booster_zero import LowLevelZeroPlugin

OPTIMIZERS = {
    "lamb": ("timm.optim", "Lamb", {"lr": 0.02, "weight_decay": 0.1, "max_grad_norm": None}),
    "came": ("came_pytorch", "CAME", {"lr": 0.01, "weight_decay": 0.1}),
    "transformers' adafactor": ("transformers", "Adafactor", {"lr": 0.01, "relative_step": False}),
}
pytestmark = pytest.mark.usefixtures("ranks_with_isolated_libraries")


@pytest.fixture(autouse=True)
def installed(name):
    """Skip the test of an optimizer whose library is not there."""
    if missing := missing_libraries([OPTIMIZERS[name][0].partition(".")[0]]):
        pytest.skip(f"{missing[0]} not installed, neither as usual nor in {FOLDER}")


@matrix(["3-options1-came"], **{"world_size, options": [(2, {"stage": 1}), (3, {"stage": 2})]}, name=list(OPTIMIZERS))
@on_ranks("world_size", timeout_seconds=120)
def test_parameters_equal_one_process(name, world_size, options):
    home, kind, settings = OPTIMIZERS[name]
    use_isolated_libraries()
    import_quietly([home])

    def two_groups(model):
        groups = [{"params": list(model[:3].parameters())}, {"params": list(model[3:].parameters()), "lr": 0.003}]
        return getattr(importlib.import_module(home), kind)(groups, **settings)

    def count_owned(_booster, _model, optimizer):
        return sum(parameter.numel() for parameter in optimizer.state)

    case = Case(
        build=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)),
        batch=noise(4, 6),
        optimizer=two_groups,
        steps=4,
        max_norm=None,
    )
    result = train_boosted(case, Setting(LowLevelZeroPlugin, {"bucket_bytes": 128, **options}), count_owned)
    expected = train_plainly(case, world_size)
    assert_same_training(result.trained, expected, case)
    owned = [None] * world_size
    dist.all_gather_object(owned, result.told)
    assert sum(owned) == sum(parameter.numel() for parameter in expected.parameters.values())
    assert max(owned) <= {2: 80, 3: 72}[world_size], "as even as whole parameters can be dealt out"
