"""The work of saves and loads grows with the number of tensors, not with its square."""

import cProfile
import pstats
from pathlib import Path

import torch
from torch import nn

from booster_core.ranks.coordinator import DistCoordinator
from booster_core.state.adapter import ParamGroup, TensorMeta
from booster_runtime.checkpoint import CheckpointFiles
from booster_runtime.checkpoint.files.optimizer_info import OptimizerInfo
from booster_runtime.checkpoint.load.optimizer_check import check_same_parameters, states_by_parameter
from booster_runtime.state.replicated import ReplicatedStateAdapter


class CountedName(str):
    """A name that counts how often it is hashed: once for each time that a set or dict looks for it or takes it in."""

    __slots__ = ()
    count = 0

    def __hash__(self):
        CountedName.count += 1
        return str.__hash__(self)

    __eq__ = str.__eq__


def hashes(num_params):
    names = tuple(CountedName(f"layers.{index}.weight") for index in range(num_params))
    info = OptimizerInfo(groups=(ParamGroup(params=names, options={}),), scalars={}, shapes=dict.fromkeys(names, (2,)))
    tensors = {f"{name}/exp_avg": TensorMeta(shape=(2,), dtype=torch.float32) for name in names}
    CountedName.count = 0
    check_same_parameters(Path("o"), info, info)
    states_by_parameter(Path("o"), tensors, info)
    return CountedName.count


def test_checking_an_optimizer_looks_up_each_parameter_a_few_times():
    assert hashes(100) > 0
    assert hashes(1600) == 16 * hashes(100)


ACTIONS = ["save_model", "load_model", "save_optimizer", "load_optimizer"]


def calls(num_params, folder):
    """Return how many functions each action calls."""
    model = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(num_params)])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model:
        parameter.grad = torch.ones(2)
    optimizer.step()
    io, adapter = CheckpointFiles(DistCoordinator()), ReplicatedStateAdapter(model, optimizer, DistCoordinator())
    counted = {}
    for action in ACTIONS:
        profile = cProfile.Profile()
        path = folder / f"{action.partition('_')[2]}-{num_params}.safetensors"
        profile.runcall(getattr(io, action), adapter, path)
        counted[action] = pstats.Stats(profile).total_calls
    return counted


def test_calls_grow_with_the_number_of_parameters(tmp_path):
    calls(10, tmp_path)  # first-time imports
    few, many = calls(150, tmp_path), calls(1200, tmp_path)
    ratios = {action: many[action] / few[action] for action in ACTIONS}
    assert all(4 < ratio < 9 for ratio in ratios.values()), ratios
