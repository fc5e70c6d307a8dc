"""Optimizers of other classes than torch's: what their steps and methods write, in place or not, reaches every rank."""

from functools import partial

import pytest
import torch
from cases import Case, Setting, assert_equals_one_process, noise
from matrix import matrix, named
from ranked import raises_on_ranks
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_core.plugin import load


class Averaging(torch.optim.Optimizer):
    """SGD that keeps averages of the parameters, which `eval` puts in their place and `train` takes out again."""

    def __init__(self, params, lr, *, through_data):
        super().__init__(params, {"lr": lr, "count": 0})
        self.through_data = through_data

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", p.clone())
                    p.sub_(p.grad, alpha=group["lr"])
                    average.lerp_(p, 1 / group["count"])

    @torch.no_grad()
    def _swap(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p in self.state:
                    kept = p.clone()
                    target = p.data if self.through_data else p
                    target.copy_(self.state[p]["average"])
                    self.state[p]["average"].copy_(kept)

    def eval(self):
        self._swap()
        return "averages"

    def train(self):
        self._swap()


class Assigning(torch.optim.SGD):
    """SGD that assigns what it has computed, as many handwritten optimizers do; its method looks ahead, as SAM's."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
                if self.evaluates_twice:
                    closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                    momentum.mul_(0.9).add_(p.grad)
                    p.data = p.data - group["lr"] * momentum
        return loss

    evaluates_twice = False

    def shrink(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = 0.5 * p.data


PLUGINS = {
    "ddp": ("ddp", {}),
    "fsdp": ("fsdp", {}),
    "zero1": ("zero", {}),
    "zero2-overlap": ("zero", {"stage": 2, "overlap_allgather": True, "bucket_bytes": 256}),
    "zero-offload": ("zero", {"offload": "cpu"}),
    "gemini": ("gemini", {"min_chunk_bytes": 256}),
    "gemini-kept": ("gemini", {"min_chunk_bytes": 256, "shard_param_frac": 0.0}),
    "gemini-offload": ("gemini", {"min_chunk_bytes": 256, "offload_param_frac": 1.0, "offload_optim_frac": 1.0}),
    "hybrid": ("hybrid", {"zero_stage": 1}),
    "hybrid3": ("hybrid", {"zero_stage": 3}),
}


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1, bias=False))


def averaging(through_data, model):
    return Averaging(model.parameters(), 0.1, through_data=through_data)


rows = noise(4, 8)


def swaps(step, _model, optimizer):
    """Train at the averages in step 2, and leave them in place at the end."""
    if step in (2, 4):
        assert optimizer.eval() == "averages"
    elif step == 3:
        optimizer.train()


def plugin_of(name, folder):
    plugin, options = PLUGINS[name]
    return load(plugin)(**options, **({"offload_dir": folder} if "offload_param_frac" in options else {}))


@matrix(1, name=PLUGINS, through_data=named([False, True], ["in-place", "data"]))
def test_what_a_method_writes_reaches_every_rank(name, through_data, tmp_path):
    optimizer = partial(averaging, through_data)
    case = Case(build=net, batch=rows, optimizer=optimizer, before_step=swaps, steps=5, max_norm=None)
    assert_equals_one_process(case, Setting(partial(plugin_of, name, str(tmp_path))))


def assigning(model):
    return Assigning(model.parameters(), 0.1)


def shrinks(step, _model, optimizer):
    if step == 2:
        optimizer.shrink()


@matrix(1, name=PLUGINS)
def test_what_is_assigned_to_data_reaches_every_rank(name, tmp_path):
    case = Case(build=net, batch=rows, optimizer=assigning, before_step=shrinks, steps=4, max_norm=None)
    assert_equals_one_process(case, Setting(partial(plugin_of, name, str(tmp_path))))


@pytest.mark.parametrize("plugin", ["zero", "gemini", "fsdp"])
@raises_on_ranks(ConfigError, "closure|several times", 2)
def test_models_are_evaluated_once_in_a_step_of_sharded_state(plugin):
    model = net()
    optimizer = assigning(model)
    optimizer.evaluates_twice = True
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, optimizer)

    def closure():
        optimizer.zero_grad()
        loss = model(rows(0, 0)).square().mean()
        booster.backward(loss, optimizer)
        return loss

    optimizer.step(closure)


@pytest.mark.parametrize("name", ["fsdp", "zero1", "gemini", "hybrid", "hybrid3"])
@raises_on_ranks(ConfigError, "Clipping lets one parameter influence", 2)
def test_an_optimizer_that_clips_by_the_norm_of_all_is_refused_where_ranks_step_on_some(name):
    class Clipping(torch.optim.SGD):
        """Clips by the norm of all parameters in its step, as those that detectron2 makes."""

        def step(self, closure=None):
            nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.01)
            return super().step(closure)

    model, (plugin, options) = net(), PLUGINS[name]
    booster = Booster(plugin=load(plugin)(**options))
    model, optimizer, *_ = booster.boost(model, Clipping(model.parameters(), 0.1))
    booster.backward(model(rows(0, 0)).square().mean(), optimizer)
    optimizer.step()
