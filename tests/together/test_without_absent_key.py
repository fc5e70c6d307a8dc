"""A torch without the dispatch key by which uses of absent parameters are seen."""

from unittest import mock

import pytest
from cases import Case, assert_same_training, noise, train_boosted, train_plainly
from plugin_runs import RUNS
from ranked import on_ranks
from torch import nn

from booster_runtime.memory import absent


@pytest.mark.parametrize("name", ["zero1", "zero2", "hybrid-dp"])
@on_ranks(2)
def test_what_keeps_parameters_whole_trains_without_it(name):
    case = Case(build=lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), batch=noise(3, 4))
    with mock.patch.multiple(absent, _BIT=None, _KEY=None):
        trained = train_boosted(case, RUNS[name]).trained
    assert_same_training(trained, train_plainly(case, 2), case)
