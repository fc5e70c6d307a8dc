"""Writes in place to what a stage receives raise at `boost`; those within a stage train as in one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from cases import Case, Setting, assert_equals_one_process, own_loss, train_boosted
from stages_in_process import cut
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
    """Clamps the weights of all layers before it calls them, and reads a value, so that no dry run does without."""

    def forward(self, x):
        with torch.no_grad():
            for layer in self.layers:
                layer.linear.weight.clamp_(-0.1, 0.1)
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


LEAF = "The forward changes in place what a layer of another stage has returned"
REFUSED = {
    ChangesADetachedValue: r"before its layer 'layers\.2': its forward changes in place what module 'norms\.0' returns",
    ChangesAnArgument: LEAF,
    LayersChangeInputs: LEAF,
    CountsInAnArgument: r"Layer 'layers\.0' changes its argument 'more' in place, which later pipeline stages",
}


@pytest.mark.parametrize(("kind", "message"), REFUSED.items(), ids=[kind.__name__ for kind in REFUSED])
def test_writes_to_what_a_stage_receives_are_refused_at_boost(kind, message):
    case = Case(build=partial(in_fp64, kind), batch=rows)
    expect_on_ranks(ConfigError, message, train_boosted, 2, case, stages())


def test_writes_to_what_another_microbatch_needs_for_backward_raise_on_every_rank():
    case = Case(build=partial(in_fp64, LayersClampThemselves), batch=rows)
    message = "The forward writes in place to a parameter or value that the backward of another microbatch"
    expect_on_ranks(ConfigError, message, train_boosted, 2, case, stages())


def test_a_dry_run_on_real_numbers_writes_to_no_parameter():
    model = in_fp64(ClampsLayers)
    before = {name: value.clone() for name, value in model.named_parameters()}
    cut(model, rows(0, 0)[:2])
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize(
    "kind",
    [
        InnerLayerChangesInput,
        ChangesBetweenLayers,
        ChangesWhatANormReturns,
        ChangesADetachedArgument,
    ],
)
def test_writes_within_a_stage_train_as_one_process(kind):
    case = Case(build=partial(in_fp64, kind), batch=rows, steps=2, tolerance=tolerance_for(torch.float64), outputs=True)
    assert_equals_one_process(case, stages())


def test_the_same_layers_are_refused_where_a_cut_is_before_the_one_that_writes():
    with pytest.raises(ConfigError, match=LEAF):
        cut(in_fp64(InnerLayerChangesInput), rows(0, 0)[:2], pp_size=4)


@pytest.mark.parametrize("kind", [RescalesInEvaluation, LayersChangeInputs, LayersClampThemselves])
def test_forwards_may_write_to_what_only_backward_uses_if_nothing_is_trained(kind):
    run_on_ranks(evaluate, 2, kind)
