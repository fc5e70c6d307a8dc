"""Schedulers of every kind go on from their JSON as if never interrupted."""

import json

import pytest
import torch
from engine_calls import EngineCalls
from torch import nn
from torch.optim import lr_scheduler as lrs

from booster_core.errors import CheckpointError

SCHEDULERS = {
    "StepLR": lambda o: lrs.StepLR(o, 2),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 4, 4]),
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda step: 0.9**step),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 7),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.5, total_steps=20),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "SequentialLR": lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o), lrs.ExponentialLR(o, 0.9)], [3]),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


def make(kind):
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    return optimizer, SCHEDULERS[kind](optimizer)


def advance(optimizer, scheduler, steps):
    rates = []
    for _ in range(steps):
        optimizer.step()
        if isinstance(scheduler, lrs.ReduceLROnPlateau):
            scheduler.step(1.0)
        else:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_loaded_scheduler_goes_on(kind, tmp_path):
    io = EngineCalls()
    optimizer, scheduler = make(kind)
    advance(optimizer, scheduler, 3)
    io.save_lr_scheduler(scheduler, tmp_path / "s.json")
    rate = optimizer.param_groups[0]["lr"]
    expected = advance(optimizer, scheduler, 5)
    json.loads((tmp_path / "s.json").read_text(), parse_constant=pytest.fail)

    optimizer, scheduler = make(kind)
    io.load_lr_scheduler(scheduler, tmp_path / "s.json")
    optimizer.param_groups[0]["lr"] = rate  # which the optimizer's own checkpoint holds
    assert advance(optimizer, scheduler, 5) == expected


def test_the_state_of_another_kind_is_refused(tmp_path):
    io = EngineCalls()
    io.save_lr_scheduler(make("StepLR")[1], tmp_path / "s.json")
    with pytest.raises(CheckpointError, match="holds the state of a StepLR; this scheduler is a LambdaLR"):
        io.load_lr_scheduler(make("LambdaLR")[1], tmp_path / "s.json")


@pytest.mark.parametrize(("content", "match"), [("{", "is not valid JSON"), ("[]", "does not hold a learning rate")])
def test_other_files_are_refused(content, match, tmp_path):
    (tmp_path / "s.json").write_text(content)
    with pytest.raises(CheckpointError, match=match):
        EngineCalls().load_lr_scheduler(make("StepLR")[1], tmp_path / "s.json")
