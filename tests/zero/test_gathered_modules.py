"""Which modules' parameters can be gathered when they run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from booster_core.errors import ConfigError
from booster_zero.gathering import check_modules


def scripted(module):
    return torch.jit.script(module)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_scripted_modules_without_parameters_are_taken():
    check_modules(nn.Sequential(nn.Linear(2, 2), scripted(nn.ReLU())))


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize("index", [0, 1])
def test_scripted_modules_with_parameters_are_named(index):
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    layers[index] = scripted(layers[index])
    with pytest.raises(ConfigError, match=f"Module '{index}' is scripted.*plugin='zero'"):
        check_modules(nn.Sequential(*layers))
