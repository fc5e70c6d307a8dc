"""`notebook_launch` runs functions that only this process has."""

import os

import pytest
import torch
from reference_plugins import ReferencePlugin

from booster_core import Booster
from booster_core.errors import ConfigError, LaunchError
from booster_core.ranks import DistCoordinator
from booster_runtime import full_gradient
from booster_tools import notebook_launch


def test_a_local_function_trains_on_two_ranks():
    x = torch.randn(8, 4)
    torch.nn.functional.linear(x, x)  # computed in the parent, as notebooks do

    def train(lr):
        booster, model = Booster(plugin=ReferencePlugin()), torch.nn.Linear(4, 1)
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=lr))
        rank = DistCoordinator().rank
        booster.backward(model(x[4 * rank : 4 * rank + 4]).mean(), optimizer)
        gradient = full_gradient(booster, model, "weight")
        return DistCoordinator().world_size, gradient

    world_size, gradient = notebook_launch(train, 2, lr=0.1)
    assert world_size == 2
    torch.testing.assert_close(gradient, x.mean(dim=0, keepdim=True))


def test_the_error_of_a_rank_reaches_the_notebook():
    def train():
        if DistCoordinator().rank == 1:
            return 1 / 0
        return None

    with pytest.raises(LaunchError, match=r"failed on rank 1 of 2(.|\n)*ZeroDivisionError: division"):
        notebook_launch(train, 2)


def test_a_rank_that_is_killed_is_named():
    with pytest.raises(LaunchError, match=r"failed on rank 0 of 1(.|\n)*ended without a Python error"):
        notebook_launch(lambda: os._exit(3), 1)


@pytest.mark.parametrize("number", [0, True, "2"])
def test_numbers_of_processes_are_checked(number):
    with pytest.raises(ConfigError, match="is no number of processes"):
        notebook_launch(print, number)


def test_calls_are_no_functions():
    with pytest.raises(TypeError, match="takes a function"):
        notebook_launch(None, 1)
