"""A profile names the parts of a step of a strategy that shards."""

import json

import torch

from booster_core import Booster
from booster_core.plugin import ModelWrapper
from booster_core.ranks import NamedCall
from booster_core.ranks.calls import OBSERVERS
from booster_runtime import collectives
from booster_testing import run_on_ranks
from booster_tools import profile

PARTS = {"forward", "backward", "clip_grad_by_norm", "step", "gather", "reduce", "save"}


def _classes():
    return NamedCall.__enter__, NamedCall.__exit__, ModelWrapper.__call__, collectives.transport_of


def _profiled(folder):
    before = _classes()
    booster, model = Booster(plugin="zero"), torch.nn.Linear(8, 8)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with profile(booster, folder, wait=0, warmup=1, active=2):
        assert before == _classes(), "calls are observed, nothing is patched"
        for step in range(3):
            booster.backward(model(torch.ones(2, 8)).mean(), optimizer)
            if step == 1:
                booster.save_model(model, folder / "model.safetensors")
            optimizer.clip_grad_by_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
    return not OBSERVERS and "save_model" not in vars(booster)


def test_parts_of_a_step_are_ranges(tmp_path):
    assert run_on_ranks(_profiled, 2, tmp_path) == [True, True]
    for rank in range(2):
        events = json.loads((tmp_path / f"trace-rank{rank}.json").read_text())["traceEvents"]
        names = {event["name"] for event in events}
        assert {f"booster:{part}" for part in PARTS} <= names
        forwards = [e for e in events if e["name"] == "booster:forward" and e.get("cat") == "user_annotation"]
        assert len(forwards) == 2  # of the active steps
