"""Writes in place between stages, or to parameters that a stage lacks, raise at `boost`; those within a stage train."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from cases import Case, Setting, assert_equals_one_process, own_loss
from torch import nn

from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_hybrid.policy.base import ShardingPolicy
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import tolerance_for


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, more=None):
        return torch.tanh(self.linear(x)) + (0 if more is None else more)


class Base(nn.Module):
    block: type[nn.Module] = Block

    def __init__(self):
        super().__init__()
        self.entry = nn.Linear(4, 4)
        self.layers = nn.ModuleList(type(self).block() for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(4))
        self.exit = nn.Linear(4, 4)

    def forward(self, x):
        x = self.entry(x)
        for index, layer in enumerate(self.layers):
            x = self.between(self.norms[index](layer(x)), index)
        return self.exit(x)

    def between(self, x, index):
        del index
        return x


class RescalesInEvaluation(Base):
    """Divides the weights of its layers where it is evaluated, and multiplies them where it is trained again."""

    is_rescaled = False

    def forward(self, x):
        if self.training == self.is_rescaled:
            for layer in self.layers:
                layer.linear.weight.data.mul_(2.0 if self.training else 0.5)
            self.is_rescaled = not self.training
        return super().forward(x)


class ClampsLayers(Base):
    """Clamps the weights of all layers before it calls them."""

    def forward(self, x):
        with torch.no_grad():
            for layer in self.layers:
                layer.linear.weight.clamp_(-1, 1)
        return super().forward(x)


class RescalesLookedAt(RescalesInEvaluation):
    """Also reads a value, so that no dry run does without numbers."""

    def forward(self, x):
        return super().forward(x) * (2.0 if bool((x > -100).all()) else 1.0)


class ChangesWhatANormReturns(Base):
    """Adds what a layer returns to what the norm before has returned, and masks the sum of both in place."""

    def forward(self, x):
        mask = (x > 0).any(-1, keepdim=True)
        x = self.entry(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(x + layer(x))
            x *= mask
        return self.exit(x)


class ChangesADetachedValue(Base):
    """Changes a value without a gradient in place before the layers, which is used after them."""

    def forward(self, x):
        x = self.entry(x)
        scale = self.norms[0](x).detach()
        scale *= 2
        for layer in self.layers:
            x = layer(x)
        return self.exit(x * scale)


class ChangesAnArgument(Base):
    """Changes what all layers are given, between two of the last stage."""

    def forward(self, x):
        x = more = self.entry(x)
        for index, layer in enumerate(self.layers):
            if index == 3:
                more += 1
            x = layer(x, more)
        return self.exit(x)


class ChangesADetachedArgument(Base):
    """Likewise, without a gradient."""

    def forward(self, x):
        x = self.entry(x)
        more = x.detach().clone()
        for index, layer in enumerate(self.layers):
            if index == 3:
                more += 1
            x = layer(x, more)
        return self.exit(x)


class LayersChangeInputs(Base):
    """Its layers add to their inputs in place."""

    class Block(Block):
        def forward(self, x):
            x += 1
            return super().forward(x)

    block = Block

    def forward(self, x):
        return self.exit(nn.Sequential(*self.layers)(self.entry(x)))


class InnerLayerChangesInput(Base):
    """One of its layers does, which is not the first of two stages."""

    def __init__(self):
        super().__init__()
        self.layers[3] = LayersChangeInputs.Block()

    def forward(self, x):
        return self.exit(nn.Sequential(*self.layers)(self.entry(x)))


class LayersClampThemselves(Base):
    """Each layer clamps its own weight."""

    class Block(Block):
        def forward(self, x, more=None):
            with torch.no_grad():
                self.linear.weight.clamp_(-0.3, 0.3)
            return super().forward(x, more)

    block = Block


class ChangesBetweenLayers(Base):
    """Changes what each layer's norm has returned before the next layer gets it."""

    def between(self, x, index):
        x += index
        return x


class CountsInAnArgument(Base):
    """Its layers add to a tensor without a gradient that all of them are given."""

    class Block(Block):
        def forward(self, x, more=None):
            more += x.detach().mean(-1, keepdim=True)
            return super().forward(x, more.clone())

    block = Block

    def forward(self, x):
        x = self.entry(x)
        more = torch.zeros_like(x[:, :1])
        for layer in self.layers:
            x = layer(x, more)
        return self.exit(x)


def in_fp64(kind):
    return kind().double()


def rows(number, replica):
    generator = torch.Generator().manual_seed(2 + 10 * number + replica)
    return torch.randn(4, 4, generator=generator, dtype=torch.float64)


def stages(pp_size=2):
    example = {"custom_policy": ShardingPolicy(layers=("layers",)), "example_batch": rows(0, 0)[:2]}
    return Setting(HybridParallelPlugin, {"pp_size": pp_size, **example}, pp_size)


def evaluate(kind):
    """Evaluate a model that is never trained, and compare with one process."""
    torch.manual_seed(3)
    whole = in_fp64(kind).eval()
    torch.manual_seed(3)
    booster = stages().make_booster()
    model, *_ = booster.boost(in_fp64(kind).eval())
    x = rows(0, 0)
    result = booster.execute_pipeline(iter([x]), model, own_loss, return_outputs=True)
    if result["outputs"] is not None:
        torch.testing.assert_close(result["outputs"], whole(x).detach())


def boost(kind, pp_size=2, *, is_training=True, trains=True):
    """Boost a model; if that is refused, it is as it was."""
    torch.manual_seed(3)
    model = in_fp64(kind).train(is_training)
    before = {name: value.clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if trains else None
    try:
        stages(pp_size).make_booster().boost(model, optimizer)
    except ConfigError:
        for name, value in model.named_parameters():
            torch.testing.assert_close(value.detach(), before[name])
        assert not (is_training and getattr(model, "is_rescaled", False)), "a dry run has left its mark"
        raise


RETURNED = (
    r"before its layer 'layers\.2': in training, its forward changes in place what module '{}' returns \(by `{}_`\)"
)
REFUSED = {
    RescalesInEvaluation: r"in evaluation, its forward writes to parameter 'layers\.\d\.linear\.weight' \(by `mul_`\)",
    ClampsLayers: r"in training, its forward writes to parameter 'layers\.\d\.linear\.weight' \(by `clamp_`\)",
    LayersClampThemselves: r"parameter 'layers\.0\.linear\.weight' \(by `clamp_`\), which the backward of",
    ChangesADetachedValue: RETURNED.format(r"norms\.0", "mul"),
    ChangesAnArgument: RETURNED.format("entry", "add"),
    LayersChangeInputs: r"before its layer 'layers\.2': .* in place argument 'x' of layer 'layers\.2' \(by `add_`\)",
}


@pytest.mark.parametrize(("kind", "message"), REFUSED.items(), ids=[kind.__name__ for kind in REFUSED])
def test_writes_that_stages_make_differently_are_refused_at_boost(kind, message):
    expect_on_ranks(ConfigError, message, boost, 2, kind)


@pytest.mark.parametrize("kind", [RescalesInEvaluation, ClampsLayers])
@pytest.mark.parametrize(("is_training", "trains"), [(False, True), (False, False)], ids=["trained", "evaluated"])
def test_writes_to_parameters_are_refused_in_either_mode(kind, is_training, trains):
    expect_on_ranks(
        ConfigError, "its forward writes to parameter", boost, 2, kind, is_training=is_training, trains=trains
    )


def test_a_run_with_numbers_stops_before_it_writes_to_parameters():
    expect_on_ranks(ConfigError, "its forward writes to parameter", boost, 2, RescalesLookedAt)


@pytest.mark.parametrize(
    "kind",
    [
        InnerLayerChangesInput,
        ChangesBetweenLayers,
        ChangesWhatANormReturns,
        CountsInAnArgument,
        ChangesADetachedArgument,
    ],
)
def test_writes_within_a_stage_train_as_one_process(kind):
    case = Case(build=partial(in_fp64, kind), batch=rows, steps=2, tolerance=tolerance_for(torch.float64), outputs=True)
    assert_equals_one_process(case, stages())


def test_the_same_layers_are_refused_where_a_cut_is_before_the_one_that_writes():
    expect_on_ranks(
        ConfigError,
        r"in training, its forward changes .* argument 'x' of layer 'layers\.3'",
        boost,
        4,
        InnerLayerChangesInput,
        4,
    )


@pytest.mark.parametrize("kind", [LayersChangeInputs, LayersClampThemselves])
def test_layers_may_change_what_only_backward_uses_if_nothing_is_trained(kind):
    run_on_ranks(evaluate, 2, kind)
