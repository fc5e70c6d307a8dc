"""What a script may do to parameters after `boost`: as in one process, or an error of Booster on every rank."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from cases import Case, Setting
from driven_runs import Run
from matrix import matrix
from torch import nn

from booster_core.errors import BoosterError
from booster_core.plugin import unwrap_model
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_testing import run_on_ranks
from booster_zero import LowLevelZeroPlugin

NAME = "first.weight"
PAGE = Path(__file__).parents[2] / "docs" / "advanced-loops.md"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.returns = False

    def forward(self, x):
        out = self.second(torch.tanh(self.first(x)))
        return (out, self.first.weight) if self.returns else out


def values():
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(7))


def init_all(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.3)
        nn.init.constant_(module.bias, 0.1)


def assign(model, _):
    parameter = model.get_parameter(NAME)
    parameter.data = values()


def assign_product(model, _):
    parameter = model.get_parameter(NAME)
    parameter.data = parameter.data * 3


def write_through_data(model, _):
    model.get_parameter(NAME).data[...] = values()


def write_element(model, _):
    with torch.no_grad():
        model.get_parameter(NAME)[5, 0] = 3.0


def write_view(model, _):
    with torch.no_grad():
        model.get_parameter(NAME)[5].zero_()


def assign_vector(model, _):
    size = sum(parameter.numel() for parameter in model.parameters())
    vector = torch.randn(size, generator=torch.Generator().manual_seed(8))
    nn.utils.vector_to_parameters(vector, model.parameters())


def in_place(name, *args):
    def operation(model, _):
        with torch.no_grad():
            getattr(model.get_parameter(NAME), name)(*(each() if callable(each) else each for each in args))

    return operation


def initialize(name):
    return lambda model, _: getattr(nn.init, name)(model.get_parameter(NAME))


def lerp(model, _):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.lerp_(parameter * 2, 0.25)


def lerp_towards_another(model, _):
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), Net().parameters(), strict=True):
            parameter.lerp_(other, 0.25)


def norm(model, _):
    found = model.get_parameter(NAME).detach().norm()
    return float(found.full_tensor() if hasattr(found, "full_tensor") else found)


def save(model, _):
    torch.save(model, io.BytesIO())


def average_states(model, _):
    state = {name: tensor * 0.5 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)


def return_it(model, _):
    unwrap_model(model).returns = True


def add_group(model, optimizer):
    second = model.get_submodule("second").requires_grad_(requires_grad=True)
    optimizer.add_param_group({"params": [*second.parameters()], "lr": 0.05})


def train(name, *, is_trained):
    def operation(model, _):
        model.get_parameter(name).requires_grad_(is_trained)

    return operation


OPERATIONS = {
    "norm": norm,
    "copy_": in_place("copy_", values),
    "fill_": in_place("fill_", 0.5),
    "clamp_": in_place("clamp_", -0.1, 0.1),
    "mul_ by a plain tensor": in_place("mul_", values),
    "nn.init.kaiming_uniform_": initialize("kaiming_uniform_"),
    "nn.init.trunc_normal_": initialize("trunc_normal_"),
    "nn.init.orthogonal_": initialize("orthogonal_"),
    "data = x": assign,
    "data = data * 3": assign_product,
    "data[...] = x": write_through_data,
    "element": write_element,
    "view": write_view,
    "vector_to_parameters": assign_vector,
    "apply(init)": lambda model, _: model.apply(init_all) and None,
    "lerp_": lerp,
    "lerp_ towards another model": lerp_towards_another,
    "register_hook": lambda model, _: model.get_parameter(NAME).register_hook(lambda gradient: gradient * 2) and None,
    "deepcopy": lambda model, _: copy.deepcopy(model) and None,
    "AveragedModel": lambda model, _: torch.optim.swa_utils.AveragedModel(model) and None,
    "torch.save": save,
    "averages of state_dict": average_states,
    "returned": return_it,
    "frozen": train(NAME, is_trained=False),
    "unfrozen": train("second.weight", is_trained=True),
    "add_param_group": add_group,
}


def build(operation):
    model = Net()
    model.second.requires_grad_(operation not in ("unfrozen", "add_param_group"))
    return model


def optimizer_for(operation, model):
    return torch.optim.SGD((model.first if operation == "add_param_group" else model).parameters(), lr=0.1)


def rows(number, rank):
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * number + rank))


def loss_of(out, _):
    return out[0].square().mean() + 0.1 * out[1].square().mean() if isinstance(out, tuple) else out.square().mean()


def start(plugin, operation):
    make = partial(optimizer_for, operation)
    case = Case(build=partial(build, operation), batch=rows, loss=loss_of, optimizer=make)
    return Run(case, None if plugin is None else Setting(PLUGINS[plugin]))


def train_on(run, loss):
    run.backward(loss)
    run.optimizer.step()
    run.optimizer.zero_grad()


def train_step(run, number):
    train_on(run, run.loss(number))


def change(run, operation):
    torch.manual_seed(11)
    found = operation(run.model, run.optimizer)
    return found if isinstance(found, float) else None


def after_boost(run, operation):
    return change(run, operation)


def after_a_step(run, operation):
    train_step(run, 0)
    return change(run, operation)


def after_evaluation(run, operation):
    train_step(run, 0)
    with torch.no_grad():
        run.loss(1)
    return change(run, operation)


def before_backward(run, operation):
    loss = run.loss(0)
    found = change(run, operation)
    train_on(run, loss)
    return found


def before_third_backward(run, operation):
    train_step(run, 1)  # by now gathers are foreseen
    train_step(run, 2)
    return before_backward(run, operation)


def in_no_sync(run, operation):
    with run.no_sync():
        run.backward(run.loss(0))
        found = change(run, operation)
    train_step(run, 1)
    return found


def in_no_grad(run, operation):
    train_step(run, 0)
    with torch.no_grad():
        run.loss(1)
        return change(run, operation)


def under_whole_parameters(run, operation):
    train_step(run, 0)
    whole = getattr(run.model, "whole_parameters", None)  # DDP's are
    with contextlib.nullcontext() if whole is None else whole(writes=True):
        return change(run, operation)


MOMENTS = {
    "after boost": after_boost,
    "after a step": after_a_step,
    "after evaluation": after_evaluation,
    "before backward": before_backward,
    "before the third backward": before_third_backward,
    "in no_sync": in_no_sync,
    "in no_grad": in_no_grad,
    "under whole_parameters": under_whole_parameters,
}


PLUGINS = {
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero": lambda: LowLevelZeroPlugin(bucket_bytes=64),  # a bucket for each parameter
    "zero with gathers that overlap": lambda: LowLevelZeroPlugin(stage=2, overlap_allgather=True),
    "gemini": lambda: GeminiPlugin(min_chunk_bytes=256),
    "hybrid with stage 3": lambda: HybridParallelPlugin(zero_stage=3),
}


def outcome(plugin, operation, moment):
    """Return what an operation leads to, and the error's class and text, or the weights."""
    run = start(plugin, operation)
    try:
        found = MOMENTS[moment](run, OPERATIONS[operation])
        for step in (2, 3):
            train_step(run, step)
    except Exception as error:  # noqa: BLE001 - every kind is judged
        return "raised", error
    return found, run.parameters()


@functools.cache
def outcome_of_one_process(operation, moment):
    return outcome(None, operation, moment)


def judge(plugin, operation, moment):
    """Return whether a cell raises, and what is wrong; ``None`` if nothing is."""
    expected, theirs = outcome_of_one_process(operation, moment)
    found, ours = outcome(plugin, operation, moment)
    if expected == "raised":  # a graph that a write has made stale; anything else is a slip of the test
        assert "modified by an inplace operation" in str(theirs), theirs
        return found == "raised", None if found == "raised" else "did not raise"
    if found == "raised":
        return True, None if isinstance(ours, BoosterError) else f"{type(ours).__name__}: {ours}"
    if isinstance(expected, float) and found != pytest.approx(expected, rel=1e-5):
        return False, f"returned {found} in place of {expected}"
    far = [name for name in theirs if not torch.allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-6)]
    return False, f"other values of {far}" if far else None


def cells(plugin):
    """Return for each operation the moments at which it raises, and for each cell that is wrong, how."""
    raising, wrong = {operation: [] for operation in OPERATIONS}, {}
    for operation, moment in itertools.product(OPERATIONS, MOMENTS):
        has_raised, how = judge(plugin, operation, moment)
        if has_raised:
            raising[operation].append(moment)
        if how is not None:
            wrong[f"{operation}, {moment}"] = how
    return raising, wrong


def told(raising):
    """Return what the documentation says of an operation that raises at some moments."""
    if not raising:
        return "works"
    if raising == ["before backward", "before the third backward"]:
        return "not before backward"
    if raising == ["before backward", "before the third backward", "under whole_parameters"]:
        return "between steps"
    if raising == list(MOMENTS):
        return "raises"
    works = [moment for moment in MOMENTS if moment not in raising]
    return "in `whole_parameters`" if works == ["under whole_parameters"] else f"raises {', '.join(raising)}"


def documented(plugin):
    """Return what the documentation says of a plugin, by operation."""
    lines = PAGE.read_text(encoding="utf-8").split("## Reading and writing parameters")[1].splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    header, _, *rows = table
    column = header.index(plugin)
    return {operation: row[column] for row in rows for operation in re.findall("`(.+?)`", row[0])}


@matrix(["fsdp", "zero", "gemini"], plugin=PLUGINS)
def test_parameters_are_as_in_one_process_or_raise(plugin):
    for raising, wrong in run_on_ranks(cells, 2, plugin):
        assert wrong == {}
        found = {each: told(raising[each]) for each in OPERATIONS}
        assert found == documented(plugin.removesuffix(" with gathers that overlap")), "the documentation's table"
