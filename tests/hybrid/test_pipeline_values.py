"""Values that pass by layers, and writes in place, under a pipeline: as in one process, or refused at `boost`."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from cases import Case, assert_equals_one_process, in_fp64, noise, own_loss, train_boosted
from hybrid_runs import stages
from ranked import on_ranks, raises_on_ranks
from stages_in_process import cut, run
from torch import nn

from booster_core.errors import BoosterError, ConfigError
from booster_testing import expect_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, mask=None):
        return torch.tanh(self.linear(x)) * (1 if mask is None else mask)


class Base(nn.Module):
    Block: type[nn.Module] = Block

    def __init__(self):
        super().__init__()
        self.entry = nn.Linear(4, 4)
        self.layers = nn.ModuleList(type(self).Block() for _ in range(4))
        self.exit = nn.Linear(4, 4)

    def forward(self, x):
        x = self.entry(x)
        for index, layer in enumerate(self.layers):
            x = self.step(layer, x, index)
        return self.exit(x)

    def step(self, layer, x, _index):
        return layer(x)


class FirstInLast(Base):
    """The last layer uses what the first one has returned next to its hidden states; none in between does."""

    class Block(Block):
        def forward(self, x, mask=None):
            return super().forward(x, mask), x.sigmoid()

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


class Stashed(Base):
    """An early layer leaves a mask in itself, which the exit reads."""

    class Block(Block):
        def forward(self, x, mask=None):
            x = super().forward(x, mask)
            self.seen = (x > 0).float()
            return x

    def forward(self, x):
        return super().forward(x) * self.layers[0].seen


class Read(Base):
    """Chooses what to compute by a value between layers, on stages that have not got it."""

    def step(self, layer, x, index):
        x = layer(x)
        return x * (2.0 if bool((x > (-9, 9)[index % 2]).any()) else 1.0)


class Listed(Base):
    """Its layers append to a list of which the loss is made: stages that don't run them would sum fewer values."""

    class Block(Block):
        def forward(self, x, noted):
            x = super().forward(x)
            noted.append(x.square().mean())
            return x

    def forward(self, x):
        x, noted = self.entry(x), []
        for layer in self.layers:
            x = layer(x, noted)
        return self.exit(x) + sum(noted)


rows = noise(4, 4, dtype=torch.float64)


EXAMPLE = rows(0, 0)[:2]


def case_of(kind, **changes):
    more = {"steps": 2, "outputs": True, "tolerance": tolerance_for(torch.float64), **changes}
    return Case(build=partial(in_fp64, kind), batch=rows, **more)


@pytest.mark.parametrize("pp_size", [2, 4])
@pytest.mark.parametrize("kind", [Read, FirstInLast])
def test_stages_in_one_process_compute_the_same(kind, pp_size):
    torch.manual_seed(0)
    model, batch = in_fp64(kind), rows(0, 0)
    plan, staged = cut(model, batch[:2], pp_size=pp_size)
    ((_, loss),), gradients = run(plan, staged, [batch], own_loss)
    expected = own_loss(model(batch), batch)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert_same_tensors(gradients, found, tolerance_for(torch.float64))


class AsksForAFormat(Base):
    """Takes the format of a part that other stages have, as transformers' `dtype` does."""

    def forward(self, x):
        return super().forward(x).to(next(self.entry.named_parameters())[1].dtype)


@pytest.mark.parametrize("kind", [FirstInLastDetached, AsksForAFormat])
def test_values_that_pass_over_stages_train_as_one_process(kind):
    assert_equals_one_process(case_of(kind), stages(EXAMPLE, 4))


def cut_at_boost(kind, pp_size=2):
    """Look at a model as `boost` does, which lets all ranks raise what one of them finds."""
    cut(in_fp64(kind), EXAMPLE, pp_size=pp_size)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Stashed, r"output \(all\) needs values of what layer 'layers\.0' writes into 'layers\.0\.seen'"),
        (Listed, r"the code outside of its layers calls `\w+` on .* there, and"),
    ],
)
def test_values_of_earlier_stages_that_are_not_sent_are_refused(kind, message):
    message = rf"can't be cut before its layer 'layers\.2': {message}"
    expect_on_ranks(ConfigError, message, train_boosted, 2, case_of(kind), stages(EXAMPLE))


def test_layers_that_return_containers_are_refused():
    class InDict(Base):
        class Block(Block):
            def forward(self, x, mask=None):
                return {"hidden": super().forward(x, mask)}

        def step(self, layer, x, _index):
            return layer(x)["hidden"]

    with pytest.raises(ConfigError, match=r"Layer 'layers\.0' returns a `dict`"):
        cut_at_boost(InDict)


# ---- writes in place


class Adding(Block):
    def forward(self, x, more=None):
        return torch.tanh(self.linear(x)) + (0 if more is None else more)


class Plain(Base):
    Block = Adding


class ChangesADetachedValue(Plain):
    """Changes a value without a gradient in place before the layers, which is used after them."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        x = self.entry(x)
        scale = self.norm(x).detach()
        scale *= 2
        for layer in self.layers:
            x = layer(x)
        return self.exit(x * scale)


class ChangesAnArgument(Plain):
    """Changes what all layers are given, between two of the last stage."""

    def forward(self, x):
        x = more = self.entry(x)
        for index, layer in enumerate(self.layers):
            if index == 3:
                more += 1
            x = layer(x, more)
        return self.exit(x)


class ChangesADetachedArgument(Plain):
    """Likewise, without a gradient."""

    def forward(self, x):
        x = self.entry(x)
        more = x.detach().clone()
        for index, layer in enumerate(self.layers):
            if index == 3:
                more += 1
            x = layer(x, more)
        return self.exit(x)


class LayersChangeInputs(Plain):
    """Its layers add to their inputs in place."""

    class Block(Adding):
        def forward(self, x):
            x += 1
            return super().forward(x)


class InnerLayerChangesInput(Plain):
    """One of its layers does, which is not the first of two stages."""

    def __init__(self):
        super().__init__()
        self.layers[3] = LayersChangeInputs.Block()


class LayersClampThemselves(Plain):
    """Each layer clamps its own weight."""

    class Block(Adding):
        def forward(self, x, more=None):
            with torch.no_grad():
                self.linear.weight.clamp_(-0.3, 0.3)
            return super().forward(x, more)


class CountsInAnArgument(Plain):
    """Its layers add to a tensor without a gradient that all of them are given."""

    class Block(Adding):
        def forward(self, x, more=None):
            more += x.detach().mean(-1, keepdim=True)
            return super().forward(x, more.clone())

    def forward(self, x):
        x = self.entry(x)
        more = torch.zeros_like(x[:, :1])
        for layer in self.layers:
            x = layer(x, more)
        return self.exit(x)


LEAF = "The forward changes in place what a layer of another stage has returned"
REFUSED = {
    ChangesADetachedValue: r"before its layer 'layers\.2': its forward changes in place what module 'norm' returns",
    ChangesAnArgument: LEAF,
    LayersChangeInputs: LEAF,
    InnerLayerChangesInput: LEAF,
    CountsInAnArgument: r"Layer 'layers\.0' changes its argument 'more' in place, which later pipeline stages",
}


@pytest.mark.parametrize(("kind", "message"), REFUSED.items(), ids=[kind.__name__ for kind in REFUSED])
def test_writes_to_what_a_stage_receives_are_refused_at_boost(kind, message):
    with pytest.raises(ConfigError, match=message):
        cut_at_boost(kind, 4 if kind is InnerLayerChangesInput else 2)  # within a stage of two, it trains


@raises_on_ranks(
    ConfigError, "The forward writes in place to a parameter or value that the backward of another microbatch", 2
)
def test_writes_to_what_another_microbatch_needs_for_backward_raise_on_every_rank():
    train_boosted(case_of(LayersClampThemselves), stages(EXAMPLE))


def test_a_dry_run_on_real_numbers_writes_to_no_parameter():
    class ClampsLayers(Plain):
        """Clamps the weights of all layers before it calls them, and reads a value, so that no dry run does without."""

        def forward(self, x):
            with torch.no_grad():
                for layer in self.layers:
                    layer.linear.weight.clamp_(-0.1, 0.1)
            return super().forward(x) * (2.0 if bool((x > -100).all()) else 1.0)

    model = in_fp64(ClampsLayers)
    before = {name: value.clone() for name, value in model.named_parameters()}
    cut(model, EXAMPLE)  # which reads a value
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("kind", [InnerLayerChangesInput, ChangesADetachedArgument])
def test_writes_within_a_stage_train_as_one_process(kind):
    assert_equals_one_process(case_of(kind), stages(EXAMPLE))


@pytest.mark.parametrize("kind", [LayersChangeInputs, LayersClampThemselves])
@on_ranks(2)
def test_forwards_may_write_to_what_only_backward_uses_if_nothing_is_trained(kind):
    """Evaluate a model that is never trained, and compare with one process."""
    torch.manual_seed(3)
    whole = in_fp64(kind).eval()
    torch.manual_seed(3)
    booster = stages(EXAMPLE).make_booster()
    model, *_ = booster.boost(in_fp64(kind).eval())
    x = rows(0, 0)
    result = booster.execute_pipeline(iter([x]), model, own_loss, return_outputs=True)
    if result["outputs"] is not None:
        torch.testing.assert_close(result["outputs"], whole(x).detach())


@raises_on_ranks(BoosterError, "needs values of parameter 'entry.weight', which another pipeline stage has", 2)
def test_a_forward_that_goes_through_all_parameters_does_not_leave_out_those_of_other_stages():
    class PenalizesAllParameters(Base):
        """Adds a penalty over its parameters to its outputs after `boost`, as peft's AdaLoRA does to the loss."""

        is_penalized = False

        def forward(self, x):
            x = super().forward(x)
            return x + sum(each.square().sum() for each in self.parameters()) if self.is_penalized else x

    def penalize(_step, model, _optimizer):
        model.is_penalized = True

    train_boosted(case_of(PenalizesAllParameters, before_step=penalize), stages(EXAMPLE))
