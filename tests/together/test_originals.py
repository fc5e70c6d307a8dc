"""What a script holds from before `boost`: its model and optimizer raise where they would train wrongly in silence."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_runtime.single import SingleDeviceStrategy
from booster_testing import run_on_ranks
from booster_testing.models import TinyMLP, tiny_llama
from booster_zero import LowLevelZeroPlugin

RUNS = {
    "single": (SingleDeviceStrategy, {}, 1),
    "ddp": (TorchDDPPlugin, {}, 2),
    "fsdp": (TorchFSDPPlugin, {}, 2),
    "zero1": (LowLevelZeroPlugin, {"stage": 1}, 2),
    "zero2": (LowLevelZeroPlugin, {"stage": 2}, 2),
    "gemini": (GeminiPlugin, {"min_chunk_bytes": 8192}, 2),
    "hybrid-tp": (HybridParallelPlugin, {"tp_size": 2}, 2),
    "hybrid-pp": (HybridParallelPlugin, {"pp_size": 2, "num_microbatches": 2}, 2),
}
WHOLE = [name for name in RUNS if name != "hybrid-pp"]


def tokens():
    return torch.arange(24).view(4, 6) % 16


def boost(run, optimizer_class=torch.optim.SGD, *, scheduled=False, wrap=lambda model: model):
    plugin_class, options, _ = RUNS[run]
    torch.manual_seed(0)
    model = tiny_llama()
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if scheduled else None
    booster = Booster(plugin=plugin_class(**options))
    return model, optimizer, booster, booster.boost(wrap(model), optimizer, lr_scheduler=scheduler)


def train_step(booster, boosted, optimizer=None):
    optimizer = optimizer or boosted.optimizer
    if is_pipeline(booster):
        batch = {"input_ids": tokens(), "labels": tokens()}
        booster.execute_pipeline(iter([batch]), boosted.model, lambda out, _: out.loss, boosted.optimizer)
    else:
        booster.backward(boosted.model(input_ids=tokens(), labels=tokens()).loss, boosted.optimizer)
    optimizer.step()


def is_pipeline(booster):
    return isinstance(booster.plugin, HybridParallelPlugin) and booster.plugin.config.pipeline.size > 1


def step_the_old(run, optimizer_class):
    _, old, booster, boosted = boost(run, optimizer_class, scheduled=True)
    before = {name: value.clone() for name, value in boosted.model.state_dict().items()}
    with pytest.raises(
        ConfigError, match=rf"`{optimizer_class.__name__}\.step` .* the optimizer that `boost` returned"
    ):
        train_step(booster, boosted, old)
    after = boosted.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items()), "nothing was stepped"
    boosted.optimizer.step()
    boosted.lr_scheduler.step()
    assert [group["lr"] for group in old.param_groups] == [0.05]
    after = boosted.model.state_dict()
    assert any(not torch.equal(value, after[name]) for name, value in before.items()), "the boosted one steps"
    with pytest.raises(ConfigError, match="returned"):
        old.step()


@pytest.mark.parametrize("run", RUNS)
def test_stepping_the_optimizer_from_before_boost_raises(run):
    run_on_ranks(step_the_old, RUNS[run][2], run, torch.optim.SGD)


def call_the_old(run):
    old, _, booster, boosted = boost(run)
    with pytest.raises(ConfigError, match="`LlamaForCausalLM` was called in training, but not through the model"):
        old(tokens())
    train_step(booster, boosted)
    boosted.optimizer.zero_grad()
    with pytest.raises(ConfigError, match="Call the boosted model itself"):
        old(tokens())
    with torch.no_grad():
        expected = boosted.model(tokens()).logits
        torch.testing.assert_close(old(tokens()).logits, expected)
    boosted.model.eval()
    torch.testing.assert_close(old(tokens()).logits.detach(), expected)
    boosted.model.train()
    assert boosted.model.generate(tokens(), max_new_tokens=2, do_sample=False).shape == (4, 8)
    train_step(booster, boosted)


@pytest.mark.parametrize("run", WHOLE)
def test_training_with_the_model_from_before_boost_raises(run):
    run_on_ranks(call_the_old, RUNS[run][2], run)


class WithMethod(TinyMLP):
    def loss(self, x):
        return self(x).square().mean()


def call_a_method(run):
    plugin_class, options, _ = RUNS[run]
    model = WithMethod()
    booster = Booster(plugin=plugin_class(**options))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(4, 8)
    with pytest.raises(ConfigError, match=r"methods of the model that call `self\(...\)`"):
        model.loss(x)
    with torch.no_grad():
        model.loss(x)
    booster.backward(model.forward(x).square().mean(), optimizer)
    optimizer.step()


@pytest.mark.parametrize("run", ["single", "ddp", "fsdp", "zero1", "gemini"])
def test_a_method_that_trains_past_the_strategy_raises(run):
    run_on_ranks(call_a_method, RUNS[run][2], run)


def call_a_registered_method():
    model = WithMethod()
    booster = Booster(plugin=TorchFSDPPlugin(forward_methods=["loss"]))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.backward(model.loss(torch.randn(4, 8)), optimizer)
    optimizer.step()


def test_a_method_that_fsdp_was_told_of_trains():
    run_on_ranks(call_a_registered_method, 2)


def test_copies_and_pickles_of_the_model_are_free():
    model = TinyMLP()
    boosted = Booster().boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(4, 8)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(boosted.model)):
        twin(x).sum().backward()
    optimizer = copy.deepcopy(boosted.optimizer.unwrap())
    optimizer.step()
    linear = nn.Linear(2, 1)
    Booster().boost(linear)
    with pytest.raises(ConfigError, match="was called in training"):
        linear(torch.ones(1, 2))
    code = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()).training, 'booster_core' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(linear), capture_output=True, check=True)
    assert done.stdout.split() == [b"True", b"False"]


def test_a_frozen_model_runs_in_training():
    teacher = TinyMLP().requires_grad_(False)
    Booster().boost(teacher)
    teacher(torch.randn(4, 8, requires_grad=True)).sum().backward()
