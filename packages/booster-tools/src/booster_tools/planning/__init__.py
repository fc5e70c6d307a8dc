"""Predicting memory and communication of a training before there are devices to run it on.

`plan` runs the plugins' own code in one process: `boost`, forward, backward and step, on tensors without values, as one
rank of a world of any size. It has no formulas for what a plugin does, but for the stages of a pipeline.
"""

from __future__ import annotations

from booster_tools.planning.candidates import Candidate
from booster_tools.planning.choice import choose_plugin
from booster_tools.planning.processes import default_processes
from booster_tools.planning.ranking import Devices, Plan, Planned, plan
from booster_tools.planning.recorder import Traffic
from booster_tools.planning.simulate import StepCost, TrainingStep, measure, shares_of, simulate

__all__ = [
    "Candidate",
    "Devices",
    "Plan",
    "Planned",
    "StepCost",
    "Traffic",
    "TrainingStep",
    "choose_plugin",
    "default_processes",
    "measure",
    "plan",
    "shares_of",
    "simulate",
]
