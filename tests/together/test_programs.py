"""Random programs of a script, run in one process and under each plugin: equal, or refused by every rank."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import example, given, settings

from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_testing import Ranks
from booster_testing.program import LAYERS, OPERATIONS, Program, judge, programs
from booster_zero import LowLevelZeroPlugin

RANKS = Ranks(2)
SETTINGS = {
    "ddp": TorchDDPPlugin,
    "ddp with a search": partial(TorchDDPPlugin, find_unused_parameters=True),
    "fsdp": TorchFSDPPlugin,
    "zero": partial(LowLevelZeroPlugin, bucket_bytes=256),  # a bucket for each parameter
    "zero with gathers that overlap": partial(LowLevelZeroPlugin, stage=2, overlap_allgather=True, bucket_bytes=512),
    "gemini": partial(GeminiPlugin, min_chunk_bytes=256),
    "hybrid": partial(HybridParallelPlugin, zero_stage=1),
    "hybrid with stage 3": partial(HybridParallelPlugin, zero_stage=3),
}
CHOSEN_BY_DATA = "routed"
TAKES_CHOSEN = ("ddp with a search", "zero", "zero with gathers that overlap")
"""Others have to be told of modules that the data chooses: FSDP and Gemini gather layers where they are called, and DDP
by default looks for unused parameters in the first step alone."""
LEFT_OUT = {"fsdp": ("data.mul_",)}
"""torch's FSDP keeps units gathered between forward and backward. What is written to their `.data` then is lost, and
nothing shows it, as under `fully_shard`."""
FOUND: list[Program] = [
    Program(("linear",), ("data = x",)),
    Program(("residual",), ("backward", "data = x")),
    Program(("routed", "linear"), ("forward", "forward", "two losses")),
    Program(("tied", "linear"), ("learning rate", "loss.backward in no_sync", "freeze", "zero_grad", "clip by value")),
    Program(("linear",), ("backward", "assign gradient")),
    Program(("linear",), ("assign gradient", "clip by norm")),
    Program(("linear",), ("forward", "freeze", "backward")),
    Program(("linear",), ("forward that raises", "save and load")),
    Program(("tied",), ("forward that raises", "penalty")),
    Program(("linear",), ("forward", "penalty", "read parameters", "backward")),
    Program(("linear",), ("forward", "backward that raises", "backward")),
    Program(("linear",), ("forward", "backward that raises", "loss.backward")),
    Program(("linear",), ("backward", "zero_grad(False)", "step")),
    Program(("linear",), ("no_sync", "zero_grad(False)", "step")),
    Program(("linear",), ("forward", "mul_", "evaluate")),
    Program(("linear",), ("no_sync", "drop gradient", "backward")),
    Program(("linear",), ("no_sync", "zero gradients", "backward")),
]
"""Programs that went wrong once."""


READS = (
    "read parameters",
    "read gradients",
    "evaluate",
    "inference mode",
    "state_dict",
    "freeze",
    "unfreeze",
    "to where it is",
)
WRITES = ("mul_", "clamp_", "copy_", "element", "lerp_", "apply(init)", "data.mul_")
WORKS = {
    "ddp": (*WRITES, "data = x", "hook", "deepcopy", "copy", "AveragedModel", "part", "train more"),
    "fsdp": ("mul_", "clamp_", "lerp_", "train more"),
    "zero": (*WRITES, "hook", "deepcopy", "copy", "AveragedModel", "part", "train more"),
    "gemini": ("hook", "part", "train more"),
    "hybrid": (*WRITES, "hook", "part", "train more"),
    "hybrid with stage 3": ("hook", "part", "train more"),
}
"""What may be done between steps, as docs/advanced-loops.md says, besides what every setting takes."""


def judged(setting, number):
    layers = [each for each in LAYERS if each != CHOSEN_BY_DATA or setting in TAKES_CHOSEN]
    operations = [each for each in OPERATIONS if each not in LEFT_OUT.get(setting, ())]

    @settings(derandomize=True, max_examples=number, deadline=None, database=None)
    @given(program=programs(layers=layers, operations=operations))
    def run(program):
        judge(program, SETTINGS[setting], RANKS)

    for program in FOUND:
        if not {*program.layers} <= {*layers}:
            continue
        run = example(program)(run)
    run()


@pytest.mark.parametrize("setting", SETTINGS)
def test_programs_are_as_in_one_process_or_refused_alike(setting):
    judged(setting, 10)


@pytest.mark.parametrize("setting", SETTINGS)
def test_forty_programs_are_as_in_one_process_or_refused_alike(setting):
    judged(setting, 40)


@pytest.mark.parametrize("setting", WORKS)
def test_what_works_between_steps_is_not_refused(setting):
    for each in [READS, ("write whole",), *[(name,) for name in WORKS[setting]]]:
        operations = ("backward", "step", *each, "backward", "step", "save and load")
        assert judge(Program(("own", "residual"), operations), SETTINGS[setting], RANKS) == [], each


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_many_programs_are_as_in_one_process_or_refused_alike(setting):
    judged(setting, 1000)
