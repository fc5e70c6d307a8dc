"""The model and the policy of docs/sharding-policies.md are as short as it says, and train as one process does."""

from __future__ import annotations

import re
import types
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_runtime import full_gradient
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.training import whole_model

PAGE = Path(__file__).parents[2] / "docs/sharding-policies.md"
STEPS = 3


def source():
    first, *_ = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return first


def example():
    """Return what the page's script defines."""
    module = types.ModuleType("page")
    exec(compile(source(), str(PAGE), "exec"), module.__dict__)
    return module


def lines(start, stop):
    """Return how many lines of code lie between two of the page."""
    text = source()
    return sum(bool(line.strip()) for line in text[text.index(start) : text.index(stop)].splitlines())


def test_the_model_has_30_lines_and_the_policy_15():
    assert lines("class Block", "policy =") <= 30
    assert lines("policy =", "if __name__") <= 15


def loss_of(model, step):
    ids = torch.randint(100, (4, 16), generator=torch.Generator().manual_seed(step))
    return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def train(options):
    page = example()
    torch.manual_seed(0)
    plain = page.GPT()
    torch.manual_seed(0)
    original = page.GPT()
    booster = Booster("cpu", plugin=HybridParallelPlugin(custom_policy=page.policy, **options))
    make = torch.optim.AdamW
    expected, (model, optimizer, *_) = (
        make(plain.parameters(), lr=1e-3, eps=1e-3),
        booster.boost(original, make(original.parameters(), lr=1e-3, eps=1e-3)),
    )
    for step in range(STEPS):
        loss, found = loss_of(plain, step), loss_of(model, step)
        torch.testing.assert_close(found, loss)
        loss.backward()
        booster.backward(found, optimizer)
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(
                full_gradient(booster, model, name), parameter.grad, rtol=1e-4, atol=1e-6, msg=name
            )
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert float(optimizer.clip_grad_by_norm(0.1)) == pytest.approx(float(norm), rel=1e-5)
        expected.step()
        optimizer.step()
        expected.zero_grad()
        optimizer.zero_grad()
    whole = whole_model(booster, model)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(whole[name], parameter.detach(), rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (2, {"tp_size": 2, "parallel_output": True}),
        pytest.param(4, {"tp_size": 4}, marks=pytest.mark.slow),
        pytest.param(4, {"tp_size": 2, "zero_stage": 1}, marks=pytest.mark.slow),
    ],
    ids=["split-logits", "uneven-heads", "zero1"],
)
def test_it_trains_as_one_process_does(num_ranks, options):
    run_on_ranks(train, num_ranks, options)


def without_policy():
    Booster("cpu", plugin=HybridParallelPlugin(tp_size=2)).boost(example().GPT())


def test_without_its_policy_the_error_says_how_to_write_one():
    message = (
        r"no sharding policy for GPT.*ModuleRule\('blocks.*linear layers: 'blocks\.\*\.qkv', 'blocks\.\*\.out'.*docs"
    )
    expect_on_ranks(ConfigError, message, without_policy, 2)
