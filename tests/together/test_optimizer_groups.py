"""What a script does with the parameters that an optimizer's groups list is right under every plugin, or raises."""

import pytest
import torch
from cases import Case, Setting, noise
from driven_runs import assert_same_loop, drive
from matrix import matrix, named
from ranked import on_ranks
from torch import nn

from booster_core.errors import ConfigError, GradientError
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_testing import expect_on_ranks
from booster_zero import LowLevelZeroPlugin

PLUGINS = {
    "ddp": Setting(TorchDDPPlugin),
    "fsdp": Setting(TorchFSDPPlugin),
    "zero-1": Setting(LowLevelZeroPlugin),
    "zero-2": Setting(LowLevelZeroPlugin, {"stage": 2, "overlap_allgather": True, "bucket_bytes": 256}),
    "gemini": Setting(GeminiPlugin, {"min_chunk_bytes": 256}),
    "hybrid-1": Setting(HybridParallelPlugin, {"zero_stage": 1}),
    "hybrid-3": Setting(HybridParallelPlugin, {"zero_stage": 3}),
}
GATHERED = ("gemini", "hybrid-3")
"""Those whose parameters have values only while forward and backward use them."""


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


rows = noise(4, 8)


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


CASE = Case(build=net, batch=rows, optimizer=sgd, max_norm=None)


def listed(run):
    return [parameter for group in run.optimizer.param_groups for parameter in group["params"]]


def decays_matrices(run):
    for step in range(3):
        run.backward(run.loss(step))
        with torch.no_grad():
            for parameter in listed(run):
                if parameter.dim() > 1:
                    parameter.mul_(0.5)
        run.step()


def decays_after_the_step(run):
    for step in range(3):
        run.backward(run.loss(step))
        run.step()
        for parameter in listed(run):
            parameter.data.mul_(0.5)


def penalizes(run):
    for step in range(3):
        run.backward(run.loss(step) + 0.1 * sum(parameter.square().sum() for parameter in listed(run)))
        run.step()


def counts(run):
    assert [tuple(each.shape) for each in listed(run)] == [(16, 8), (16,), (1, 16), (1,)]
    run.backward(run.loss(0))
    run.step()
    assert sum(each.numel() for each in listed(run)) == 161


def centralizes_gradients(run):
    run.backward(run.loss(0))
    for parameter in listed(run):
        if parameter.dim() > 1:
            parameter.grad.sub_(parameter.grad.mean(dim=1, keepdim=True))
    run.step()


def resets_state(run):
    for step in range(3):
        run.backward(run.loss(step))
        run.step()
        for parameter in listed(run):
            if parameter in run.optimizer.state:
                run.optimizer.state[parameter]["momentum_buffer"].zero_()


def clears_state(run):
    for step in range(3):
        run.backward(run.loss(step))
        run.step()
        run.optimizer.state.clear()


REFUSED = {
    decays_matrices: dict.fromkeys(GATHERED, ConfigError),
    decays_after_the_step: dict.fromkeys(GATHERED, ConfigError),
    penalizes: dict.fromkeys(("fsdp", *GATHERED), ConfigError),  # torch mixes no DTensor with the loss
    counts: {},
    centralizes_gradients: dict.fromkeys(PLUGINS.keys() - {"ddp", "fsdp"}, GradientError),
    resets_state: dict.fromkeys(PLUGINS.keys() - {"ddp", "fsdp"}, ConfigError),
    clears_state: {},
}
"""For each loop, under which plugins it raises on every rank."""


@matrix(1, name=PLUGINS, loop=named([*REFUSED], [loop.__name__ for loop in REFUSED]))
def test_groups_list_the_models_parameters(name, loop):
    setting = PLUGINS[name]
    if name in REFUSED[loop]:
        error = REFUSED[loop][name]
        expect_on_ranks(error, "", drive, 2, loop, CASE, setting, 2, {})
    else:
        assert_same_loop(loop, CASE, setting)


@on_ranks(2)
def test_lists_that_a_script_changes_are_refused():
    booster = PLUGINS["zero-1"].make_booster()
    model = net()
    model, optimizer, *_ = booster.boost(model, sgd(model))
    booster.backward(model(rows(0, 0)).square().mean(), optimizer)
    first = optimizer.param_groups[0]["params"].pop(0)
    with pytest.raises(ConfigError, match="Group 0 of the optimizer lists 3 parameters, and had 4"):
        optimizer.step()
    optimizer.param_groups[0]["params"].insert(0, first)
    optimizer.unwrap().add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(ConfigError, match=r"has 2 groups, and had 1\. Add groups by `add_param_group`"):
        optimizer.step()
