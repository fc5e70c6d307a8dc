"""Values without gradients are sent to later stages, as arguments of layers or as what modules return; others raise."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import Case, Setting, assert_equals_one_process, train_boosted
from stages_in_process import cut, run
from torch import nn

from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_hybrid.policy.base import ShardingPolicy
from booster_testing import expect_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, mask=None):
        return torch.tanh(self.linear(x)) * (1 if mask is None else mask)


class Base(nn.Module):
    block: type[nn.Module] = Block

    def __init__(self):
        super().__init__()
        self.entry = nn.Linear(4, 4)
        self.layers = nn.ModuleList(type(self).block() for _ in range(4))
        self.exit = nn.Linear(4, 4)


class Masking(Block):
    def forward(self, x, mask=None):
        x = super().forward(x, mask)
        return x, x > 0


class MaskFromLayer(Base):
    """Passes a boolean mask from layer to layer."""

    block = Masking

    def forward(self, x):
        x, mask = self.entry(x), None
        for layer in self.layers:
            x, mask = layer(x, mask)
        return self.exit(x)


class PassedMask(Base):
    """Its layers return the mask of the batch as they were given it."""

    class Block(Block):
        def forward(self, x, mask=None):
            return super().forward(x, mask), mask

    block = Block

    def forward(self, x):
        mask = x > 0
        x = self.entry(x)
        for layer in self.layers:
            x, mask = layer(x, mask)
        return self.exit(x)


class DetachedOfLayers(Base):
    """Each layer also returns a detached value, of which the head uses all."""

    class Block(Block):
        def forward(self, x, mask=None):
            x = super().forward(x, mask)
            return x, (x * x).detach()

    block = Block

    def forward(self, x):
        x, seen = self.entry(x), []
        for layer in self.layers:
            x, value = layer(x)
            seen.append(value)
        return self.exit(x * torch.stack(seen).sum(0))


class DetachedToNext(DetachedOfLayers):
    """Each layer multiplies by the detached value of the layer before."""

    def forward(self, x):
        x, value = self.entry(x), None
        for layer in self.layers:
            x, value = layer(x, value)
        return self.exit(x)


class FirstInLast(Base):
    """The last layer uses what the first one has returned next to its hidden states; none in between does."""

    class Block(Block):
        def forward(self, x, mask=None):
            return super().forward(x, mask), x.sigmoid()

    block = Block

    def forward(self, x):
        x, first = self.entry(x), None
        for index, layer in enumerate(self.layers):
            x, value = layer(x, first if index == 3 else None)
            first = value if index == 0 else first
        return self.exit(x)


class FirstInLastDetached(FirstInLast):
    class Block(Block):
        def forward(self, x, mask=None):
            return super().forward(x, mask), x.detach().sigmoid()

    block = Block


class Stashed(Base):
    """An early layer leaves a mask in itself, which the exit reads."""

    class Block(Block):
        def forward(self, x, mask=None):
            x = super().forward(x, mask)
            self.seen = (x > 0).float()
            return x

    block = Block

    def forward(self, x):
        x = self.entry(x)
        for layer in self.layers:
            x = layer(x)
        return self.exit(x) * self.layers[0].seen


class Mapped(Base):
    """Notes what layers return in memory of its own, and maps over values by a transform."""

    def forward(self, x):
        x = self.entry(x)
        noted = torch.zeros_like(x)
        for layer in self.layers:
            x = layer(x)
            noted.copy_(x.detach())
            x = x * torch.vmap(lambda number: number / 2 + 1)(torch.arange(4.0))
        return self.exit(x)


class Read(Base):
    """Chooses what to compute by a value between layers, on stages that have not got it."""

    def forward(self, x):
        x = self.entry(x)
        for layer, least in zip(self.layers, (-9, 9, -9, 9), strict=True):
            x = layer(x)
            scale = 2.0 if bool((x > least).any()) else 1.0
            x = x * scale
        return self.exit(x)


class ReadInside(Stashed):
    """Chooses what to compute by a value that an early layer leaves in itself."""

    def forward(self, x):
        x = self.entry(x)
        for layer in self.layers:
            x = layer(x)
        return self.exit(x) * (2.0 if bool(self.layers[0].seen.any()) else 1.0)


class Listed(Base):
    """Its layers append to a list of which the loss is made: stages that don't run them would sum fewer values."""

    class Block(Block):
        def forward(self, x, noted):
            x = super().forward(x)
            noted.append(x.square().mean())
            return x

    block = Block

    def forward(self, x):
        x, noted = self.entry(x), []
        for layer in self.layers:
            x = layer(x, noted)
        return self.exit(x) + sum(noted)


@dataclasses.dataclass
class Result:
    out: torch.Tensor
    seen: list[torch.Tensor]


class ResultObject(Base):
    """Returns a dataclass with the state of an early layer."""

    def forward(self, x):
        x, seen = self.entry(x), []
        for layer in self.layers:
            x = layer(x)
            seen.append(x)
        return Result(self.exit(x), seen)


class ResultInDict(ResultObject):
    def forward(self, x):
        result = super().forward(x)
        return {"out": result.out, "more": result}


class Opaque:
    """A class that nothing opens."""

    def __init__(self, out, seen):
        self.out, self.seen = out, seen


class OpaqueResult(ResultObject):
    def forward(self, x):
        result = super().forward(x)
        return Opaque(result.out, [each.detach() for each in result.seen])


@dataclasses.dataclass
class State:
    hidden: torch.Tensor
    mask: torch.Tensor


class InDict(Base):
    class Block(Block):
        def forward(self, x, mask=None):
            return {"hidden": super().forward(x, mask)}

    block = Block

    def forward(self, x):
        x = self.entry(x)
        for layer in self.layers:
            x = layer(x)["hidden"]
        return self.exit(x)


class InTuple(Base):
    class Block(Block):
        def forward(self, x, mask=None):
            return None, super().forward(x, mask)

    block = Block

    def forward(self, x):
        x = self.entry(x)
        for layer in self.layers:
            x = layer(x)[1]
        return self.exit(x)


class InDataclass(Base):
    class Block(Block):
        def forward(self, state):
            return State(super().forward(state.hidden, state.mask), state.mask)

    block = Block

    def forward(self, x):
        state = State(self.entry(x), x > 0)
        for layer in self.layers:
            state = layer(state)
        return self.exit(state.hidden)


def out_of(outputs):
    return (
        outputs if isinstance(outputs, torch.Tensor) else outputs["out"] if isinstance(outputs, dict) else outputs.out
    )


def loss_of(outputs, _):
    """Return a loss that depends on a dataclass's further tensors, where there are some."""
    more = outputs["more"] if isinstance(outputs, dict) and "more" in outputs else outputs
    seen = more.seen[0].mean() if isinstance(more, Result) else 0
    return out_of(outputs).square().mean() + seen


def rows(number, replica):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(2 + 10 * number + replica))


def case_of(kind):
    return Case(build=kind, batch=rows, loss=loss_of, steps=2, outputs=True)


def stages(pp_size=2):
    example = {"custom_policy": ShardingPolicy(layers=("layers",)), "example_batch": torch.ones(2, 4)}
    return Setting(HybridParallelPlugin, {"pp_size": pp_size, **example}, pp_size)


KINDS = (MaskFromLayer, PassedMask, Mapped, DetachedOfLayers, Read, InTuple, ResultInDict, OpaqueResult, FirstInLast)
"""What `test_generated_stages` has no shapes for."""


@pytest.mark.parametrize("pp_size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_stages_in_one_process_compute_the_same(kind, pp_size):
    torch.manual_seed(0)
    model, batch = kind(), rows(0, 0)
    plan, staged = cut(model, batch[:2], pp_size=pp_size)
    ((_, loss),), gradients = run(plan, staged, [batch], loss_of)
    expected = loss_of(model(batch), batch)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert_same_tensors(gradients, found, tolerance_for(torch.float32))


@pytest.mark.parametrize("kind", [FirstInLastDetached, DetachedToNext])
def test_values_that_pass_over_stages_train_as_one_process(kind):
    assert_equals_one_process(case_of(kind), stages(4))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Stashed, r"output \(all\) needs values of what layer 'layers\.0' writes into 'layers\.0\.seen'"),
        (ReadInside, r"`item` needs values of what layer 'layers\.0' writes into 'layers\.0\.seen'"),
        (Listed, r"the code outside of its layers calls `\w+` on .* there, and"),
    ],
)
def test_values_of_earlier_stages_that_are_not_sent_are_refused(kind, message):
    message = rf"can't be cut before its layer 'layers\.2': {message}"
    expect_on_ranks(ConfigError, message, train_boosted, 2, case_of(kind), stages())


@pytest.mark.parametrize(
    ("kind", "returned"),
    [(InDict, "dict"), pytest.param(InDataclass, "State", marks=pytest.mark.slow)],
)
def test_layers_that_return_containers_are_refused(kind, returned):
    message = rf"Layer 'layers\.0' returns a `{returned}`"
    expect_on_ranks(ConfigError, message, train_boosted, 2, case_of(kind), stages())
