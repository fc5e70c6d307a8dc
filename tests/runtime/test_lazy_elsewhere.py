"""Lazy tensors outside of the model's modules (closures, caches, criteria, optimizer state) get their values too."""

import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from booster_core import Booster
from booster_core.errors import LazyInitError
from booster_runtime import LazyInitContext
from booster_runtime.lazy import is_lazy, materialize
from booster_testing.models import TinyMLP

SEED = 7


@dataclass
class Cache:
    """Keeps a tensor deeper than modules' attributes are searched."""

    table: Tensor = field(default_factory=lambda: torch.rand(4))


class Penalty:
    """A criterion that is no module."""

    def __init__(self, model: nn.Module) -> None:
        self.weight = torch.rand(4)
        self.reference = model.first.weight.detach().clone()

    def __call__(self, model: nn.Module) -> Tensor:
        return (model.first.weight - self.reference).square().sum() * self.weight.sum()


def build(lazy: bool, make: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(SEED)
    if not lazy:
        model = TinyMLP()
        return model, make(model)
    with LazyInitContext():
        model = TinyMLP()
        return model, make(model)


def closure(_: nn.Module) -> Any:
    scale = torch.rand(3)
    return lambda: scale


def cached(model: nn.Module) -> Any:
    model.cache = Cache()
    return lambda: model.cache.table


def nested(model: nn.Module) -> Any:
    model.deep = {"a": [({"b": [[torch.rand(2)]]},)]}
    return lambda: model.deep["a"][0][0]["b"][0][0]


def plain_criterion(model: nn.Module) -> Any:
    criterion = Penalty(model)
    return lambda: criterion.weight


@pytest.mark.parametrize("make", [closure, cached, nested, plain_criterion])
@pytest.mark.parametrize("boosts", [False, True])
def test_tensors_outside_of_modules_get_their_values(make, boosts) -> None:
    _, expected = build(False, make)
    model, found = build(True, make)
    if boosts:
        Booster().boost(model)
    else:
        materialize(model)
    assert type(found()) is Tensor
    assert torch.equal(found(), expected())


def test_a_criterion_with_weights_gets_its_values() -> None:
    def weighted(_: nn.Module) -> nn.Module:
        return nn.CrossEntropyLoss(weight=torch.rand(4))

    _, expected = build(False, weighted)
    model, criterion = build(True, weighted)
    boosted = Booster().boost(model, criterion=criterion)
    assert boosted[2] is criterion
    assert type(criterion.weight) is Tensor
    assert torch.equal(criterion.weight, expected.weight)


def test_a_criterion_alone_may_be_lazy() -> None:
    torch.manual_seed(SEED)
    expected = nn.CrossEntropyLoss(weight=torch.rand(4))
    torch.manual_seed(SEED)
    with LazyInitContext():
        criterion = nn.CrossEntropyLoss(weight=torch.rand(4))
    Booster().boost(TinyMLP(), criterion=criterion)
    assert torch.equal(criterion.weight, expected.weight)


def test_views_of_parameters_follow_the_parameters() -> None:
    model, view = build(True, lambda model: model.first.weight.detach()[:2])
    materialize(model)
    model.first.weight.data.fill_(3.0)
    assert torch.equal(view, torch.full((2, 8), 3.0))


def test_another_model_of_the_context_stays_lazy() -> None:
    model, other = build(True, lambda _: TinyMLP())
    materialize(model)
    assert is_lazy(other)
    materialize(other)
    assert torch.equal(other.first.weight, build(False, lambda _: TinyMLP())[1].first.weight)


def test_a_tensor_that_cannot_change_in_place_is_named() -> None:
    model, held = build(True, lambda _: [torch.rand(5)])
    weak = weakref.ref(held[0])
    with pytest.raises(LazyInitError, match=r"tensor of shape \(5,\) .* held by a list"):
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


def test_post_accumulate_grad_hooks_stay() -> None:
    with LazyInitContext():
        model = TinyMLP()
    seen: list[tuple[int, ...]] = []
    handle = model.first.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.shape))
    materialize(model)
    model(torch.ones(2, 8)).sum().backward()
    assert seen == [model.first.weight.shape]
    handle.remove()
    model(torch.ones(2, 8)).sum().backward()
    assert len(seen) == 1
