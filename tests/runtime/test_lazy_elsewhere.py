"""Lazy tensors that are not the model's: those of criteria and of optimizer state get their values too."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from booster_core import Booster
from booster_core.errors import LazyInitError
from booster_runtime import LazyInitContext
from booster_runtime.lazy import materialize
from booster_testing.models import TinyMLP

SEED = 7


def build(lazy: bool, make: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(SEED)
    if not lazy:
        model = TinyMLP()
        return model, make(model)
    with LazyInitContext():
        model = TinyMLP()
        return model, make(model)


def test_what_no_module_holds_stays_lazy_and_says_so() -> None:
    model, held = build(True, lambda _: torch.rand(8))
    Booster().boost(model)
    assert type(model.first.weight.data) is Tensor
    with pytest.raises(LazyInitError, match="A lazy model was run"):
        torch.ones(8) * held


@pytest.mark.parametrize("alone", [False, True])
def test_a_criterion_with_weights_gets_its_values(alone) -> None:
    _, expected = build(False, lambda _: nn.CrossEntropyLoss(weight=torch.rand(4)))
    model, criterion = build(True, lambda _: nn.CrossEntropyLoss(weight=torch.rand(4)))
    boosted = Booster().boost(TinyMLP() if alone else model, criterion=criterion)
    assert boosted[2] is criterion
    assert type(criterion.weight) is Tensor
    assert torch.equal(criterion.weight, expected.weight)


def test_a_tensor_that_cannot_change_in_place_is_named() -> None:
    def keep(model: nn.Module) -> list[Tensor]:
        model.kept = [torch.rand(5)]
        return model.kept

    model, held = build(True, keep)
    weak = weakref.ref(held[0])
    with pytest.raises(LazyInitError, match=r"tensor of shape \(5,\) in a list, tuple or dict of a module"):
        materialize(model)
    assert weak() is held[0]


@pytest.mark.parametrize("initial", [0.0, 0.5])
def test_optimizer_state_made_at_construction_gets_its_values(initial) -> None:
    def adagrad(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=initial)

    eager, expected = build(False, adagrad)
    model, optimizer = build(True, adagrad)
    booster = Booster()
    boosted, wrapped, *_ = booster.boost(model, optimizer)
    x = torch.ones(2, 8)
    for _ in range(2):
        for run, stepper in ((boosted, wrapped), (eager, expected)):
            run(x).square().sum().backward()
            stepper.step()
            stepper.zero_grad()
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(optimizer.state[one]["sum"], expected.state[other]["sum"])
