"""A torch without the dispatch key by which uses of absent parameters are seen."""

from unittest import mock

import pytest
from cases import Case, assert_same_training, noise, train_boosted, train_plainly
from plugin_runs import RUNS
from torch import nn

from booster_runtime.memory import absent
from booster_testing import run_on_ranks


def build():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


CASE = Case(build=build, batch=noise(3, 4))


def train_without_key(name):
    with mock.patch.multiple(absent, _BIT=None, _KEY=None):
        return train_boosted(CASE, RUNS[name]).trained


@pytest.mark.parametrize("name", ["zero1", "zero2", "hybrid-dp"])
def test_what_keeps_parameters_whole_trains_without_it(name):
    for trained in run_on_ranks(train_without_key, 2, name):
        assert_same_training(trained, train_plainly(CASE, 2), CASE)
