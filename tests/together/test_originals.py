"""What a script holds from before `boost`: its model and optimizer raise where they would train wrongly in silence."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from cases import Setting
from plugin_runs import backward, boosted, runs, step
from ranked import on_ranks
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_fsdp import TorchFSDPPlugin
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.models import TinyMLP, tiny_llama

RUNS = runs("single", "ddp", "fsdp", "zero1", "zero2", "gemini", "hybrid-tp", "hybrid-pp")
WHOLE = [name for name in RUNS if name != "hybrid-pp"]
TOKENS = torch.arange(24).view(4, 6) % 16
BATCH = {"input_ids": TOKENS, "labels": TOKENS}


def boost(run, *, scheduled=False):
    torch.manual_seed(0)
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if scheduled else None
    booster = RUNS[run].make_booster()
    return model, optimizer, booster, booster.boost(model, optimizer, lr_scheduler=scheduler)


@pytest.mark.parametrize("run", RUNS)
@on_ranks(lambda run: RUNS[run].num_ranks)
def test_stepping_the_optimizer_from_before_boost_raises(run):
    _, old, booster, made = boost(run, scheduled=True)
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    backward(booster, made.model, made.optimizer, BATCH)
    with pytest.raises(ConfigError, match=r"`SGD\.step` .* the optimizer that `boost` returned"):
        old.step()
    after = made.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items()), "nothing was stepped"
    made.optimizer.step()
    made.lr_scheduler.step()
    assert [group["lr"] for group in old.param_groups] == [0.05]
    after = made.model.state_dict()
    assert any(not torch.equal(value, after[name]) for name, value in before.items()), "the boosted one steps"
    with pytest.raises(ConfigError, match="returned"):
        old.step()


@pytest.mark.parametrize("run", WHOLE)
@on_ranks(lambda run: RUNS[run].num_ranks)
def test_training_with_the_model_from_before_boost_raises(run):
    old, _, booster, made = boost(run)
    with pytest.raises(ConfigError, match="`LlamaForCausalLM` was called in training, but not through the model"):
        old(TOKENS)
    step(booster, made.model, made.optimizer, BATCH)
    with pytest.raises(ConfigError, match="Call the boosted model itself"):
        old(TOKENS)
    with torch.no_grad():
        expected = made.model(TOKENS).logits
        torch.testing.assert_close(old(TOKENS).logits, expected)
    made.model.eval()
    torch.testing.assert_close(old(TOKENS).logits.detach(), expected)
    made.model.train()
    assert made.model.generate(TOKENS, max_new_tokens=2, do_sample=False).shape == (4, 8)
    step(booster, made.model, made.optimizer, BATCH)


class WithMethod(TinyMLP):
    def loss(self, x):
        return self(x).square().mean()


@pytest.mark.parametrize("run", ["single", "ddp", "fsdp", "zero1", "gemini"])
@on_ranks(lambda run: RUNS[run].num_ranks)
def test_a_method_that_trains_past_the_strategy_raises(run):
    booster, model, optimizer = boosted(RUNS[run], WithMethod())
    x = torch.randn(4, 8)
    with pytest.raises(ConfigError, match=r"methods of the model that call `self\(...\)`"):
        model.loss(x)
    with torch.no_grad():
        model.loss(x)
    booster.backward(model.forward(x).square().mean(), optimizer)
    optimizer.step()


@on_ranks(2)
def test_a_method_that_fsdp_was_told_of_trains():
    booster, model, optimizer = boosted(Setting(TorchFSDPPlugin, {"forward_methods": ["loss"]}), WithMethod())
    booster.backward(model.loss(torch.randn(4, 8)), optimizer)
    optimizer.step()


@pytest.mark.parametrize("run", ["single", "ddp"])
@on_ranks(lambda run: RUNS[run].num_ranks)
def test_an_optimizer_made_after_boost_trains_as_in_one_process(run):
    torch.manual_seed(0)
    plain, x = TinyMLP(), torch.randn(4, 8)
    booster = RUNS[run].make_booster()
    model = booster.boost(copy.deepcopy(plain)).model
    coordinator = booster.context.coordinator
    for net, own in ((model, x[coordinator.rank :: coordinator.world_size]), (plain, x)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            net(own).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_tensors(model.state_dict(), plain.state_dict(), tolerance_for(torch.float32))


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
