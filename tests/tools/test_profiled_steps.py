"""A profile names the parts of a step, and nothing of it stays."""

import json

import pytest
import torch
from reference_plugins import ReferencePlugin

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_core.plugin import ModelWrapper
from booster_core.ranks import NamedCall
from booster_core.ranks.calls import OBSERVERS
from booster_runtime import collectives
from booster_testing import run_on_ranks
from booster_tools import profile

PARTS = {"forward", "backward", "clip_grad_by_norm", "step", "reduce", "save"}


def classes():
    return NamedCall.__enter__, NamedCall.__exit__, ModelWrapper.__call__, collectives.transport_of


def profiled(folder):
    before = classes()
    booster, model = Booster(plugin=ReferencePlugin()), torch.nn.Linear(8, 8)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    flag = torch.ones(1)
    with profile(booster, folder, wait=0, warmup=1, active=2):
        assert before == classes(), "calls are observed, nothing is patched"
        for step in range(3):
            booster.backward(model(torch.ones(2, 8)).mean(), optimizer)
            if step == 1:
                booster.save_model(model, folder / "model.safetensors")
            collectives.all_reduce(flag).wait()
            optimizer.clip_grad_by_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert flag.item() == 2**3, "what is named is what is called"
    return not OBSERVERS and "save_model" not in vars(booster)


def test_parts_of_a_step_are_ranges(tmp_path):
    assert run_on_ranks(profiled, 2, tmp_path) == [True, True]
    for rank in range(2):
        events = json.loads((tmp_path / f"trace-rank{rank}.json").read_text())["traceEvents"]
        names = {event["name"] for event in events}
        assert {f"booster:{part}" for part in PARTS} <= names
        forwards = [e for e in events if e["name"] == "booster:forward" and e.get("cat") == "user_annotation"]
        assert len(forwards) == 2  # of the active steps


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"active": 0}, "`active=0` of `booster_tools.profile`"),
        ({"wait": -1}, "`wait=-1`"),
        ({"warmup": True}, "`warmup=True`"),
    ],
)
def test_numbers_of_steps_are_checked(settings, message, tmp_path):
    with pytest.raises(ConfigError, match=message), profile(Booster(), tmp_path, **settings):
        pass


@pytest.mark.parametrize("steps", [1, 2])
def test_a_block_without_a_step_to_keep_says_that_there_is_no_trace(steps, tmp_path):
    booster, model = Booster(), torch.nn.Linear(2, 1)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def profiled():
        with profile(booster, tmp_path):
            for _ in range(steps):
                optimizer.step()

    with pytest.raises(ConfigError, match=rf"wrote no trace: the block took {steps} optimizer step"):
        profiled()
