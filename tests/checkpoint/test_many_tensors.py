"""Work, messages and open files of saves and loads with many tensors, many ranks and many files."""

import cProfile
import pstats
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine_calls import EngineCalls
from many_ranks import NUM_TENSORS, planned_on_one_of_many
from torch import nn

from booster_checkpoint.session import Session, places_in_message
from booster_core.matching import check_same_parameters, states_by_parameter
from booster_core.ranks.coordinator import DistCoordinator
from booster_core.state import OptimizerInfo, ReplicatedStateAdapter
from booster_core.state.adapter import ParamGroup, TensorMeta
from booster_testing import run_on_ranks


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
    io, adapter = EngineCalls(), ReplicatedStateAdapter(model, optimizer, DistCoordinator())
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


# ---- many ranks


NUM_RANKS = 1024


@pytest.mark.parametrize("has_experts", [False, True])
def test_planning_a_save_of_many_tensors_on_many_ranks_takes_little(has_experts, tmp_path):
    """16 MiB at most are received, and two seconds taken; the next save reuses what is as it was."""
    (first, received, seconds), (second, received_again, _) = planned_on_one_of_many(
        tmp_path, NUM_RANKS, has_experts=has_experts
    )
    for plan in (first, second):
        assert sum(len(file.specs) for file in plan.files) == NUM_TENSORS
    assert second.files == first.files
    assert received < 16 << 20  # less than a byte a tensor and rank
    assert seconds < 2
    assert received_again <= received - NUM_TENSORS * 8


def shared_out(keys):
    """Return what each rank keeps of the values that travel, as `gather_each` shares them out."""
    return places_in_message([[(bytes([key]), 10) for key in rank_keys] for rank_keys in keys])


def test_values_that_all_ranks_have_do_not_travel_and_others_travel_once():
    assert shared_out([[1, 2], [1, 2], [1, 2]]) == {}
    assert shared_out([[1, 2], [1, 3], [1, 3]]) == {(b"\2", 10): (0, 0), (b"\3", 10): (1, 10)}
    assert shared_out([[4, 4], [4, 5]]) == {(b"\5", 10): (1, 0)}


def gathered_entries():
    rank = DistCoordinator().rank
    session = Session(DistCoordinator(), timeout_seconds=None)
    entries = session.gather_each("test", Path(), lambda: [("alike", 1), f"of rank {rank}", ["two" if rank else "one"]])
    assert entries == [[("alike", 1), f"of rank {each}", ["two" if each else "one"]] for each in range(3)]
    assert session.total_over_ranks([rank, 1, 2**40]) == [3, 3, 3 * 2**40]
    lines = [f"of rank {rank}", "of all", *(["of two"] if rank else [])]
    assert session.union(lines) == ["of all", "of rank 0", "of rank 1", "of rank 2", "of two"]
    assert session.gather("test", Path(), lambda: rank) == [0, 1, 2]
    assert session.gather_to_first({"rank": rank}) == ([] if rank else [{"rank": each} for each in range(3)])
    return entries[1][2] is entries[2][2], entries[0][0] is entries[2][0]


def test_ranks_learn_what_each_of_them_says():
    assert run_on_ranks(gathered_entries, 3) == [(True, True)] * 3


# ---- many files


def test_few_files_are_open_however_many_a_checkpoint_has(tmp_path):
    script = """
import os, resource, sys
import torch
from pathlib import Path
from types import SimpleNamespace
from torch import nn
from booster_core import Booster
from booster_core.ranks import DistCoordinator
from booster_checkpoint.files.names import MODEL, FileNames
from booster_checkpoint.save.parts import ModelPart
from booster_checkpoint.save.save import BUCKET_BYTES, Saver
from booster_checkpoint.save.targets import target_at
from booster_checkpoint.session import Session
from booster_checkpoint.load.source import open_source
from booster_core.state import ReplicatedStateAdapter

saver = Saver(Session(DistCoordinator(), timeout_seconds=None), BUCKET_BYTES)
model = nn.ParameterList([nn.Parameter(torch.full((64,), float(index))) for index in range(500)])
adapter = ReplicatedStateAdapter(model, None, DistCoordinator())
used = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 48, used + 48))
part = ModelPart(adapter, FileNames(base=MODEL), max_bytes=256)
saver.save([part], target_at(Path(sys.argv[1])), "save")
files = list(Path(sys.argv[1]).glob("*.safetensors"))
assert len(files) == 500, len(files)
with torch.no_grad():
    for parameter in model:
        parameter.zero_()
Booster("cpu").load_model(model, sys.argv[1])
assert all(bool((parameter == index).all()) for index, parameter in enumerate(model))
assert len(os.listdir("/proc/self/fd")) <= used + 1
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
