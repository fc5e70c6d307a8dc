"""Batches of other forms than the example: other entries, flags and kinds of tensors take a pipeline other ways."""

from __future__ import annotations

import pytest
import torch
from cases import Case, Setting, assert_equals_one_process
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_runtime.data import tensors_of
from booster_testing import run_on_ranks


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, gate=None, *, states=False):
        y = torch.tanh(self.linear(x))
        if gate is not None:
            y = y * gate
        return (y, y.detach() > 0) if states else y


class Net(nn.Module):
    """Does more where it is asked to: what its stages send each other differs."""

    def __init__(self):
        super().__init__()
        self.entry, self.exit = nn.Linear(4, 4), nn.Linear(4, 3)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.position = nn.Linear(2, 4)

    def forward(self, x, place=None, gate=None, *, gated=False, states=False, residual=False, skips=False):
        first = h = self.entry(x)
        if place is not None:
            h = h + self.position(place)
        if gated:
            gate = h > 0  # of what the first stage alone has, and without a gradient
        seen = []
        for index, layer in enumerate(self.layers):
            if skips and index == 2:
                continue
            h = layer(h, gate, states=states)
            if states:
                h, mask = h
                seen += [h, mask]
        if residual:
            h = h + first
        return (self.exit(h), *seen) if states else self.exit(h)


def loss_of(outputs, _batch):
    return sum(each.float().square().mean() for _, each in tensors_of(outputs))


def noise(seed):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))


FORMS = (
    {},
    {"gated": True},
    {"states": True},
    {"place": torch.linspace(-1, 1, 16).view(8, 2)},
    {"residual": True, "gate": torch.linspace(0, 1, 32).view(8, 4)},
    {"gate": torch.linspace(0, 1, 32).view(8, 4) > 0.4},
    {"states": True, "gated": True, "residual": True},
    {},
)


def batch_of_turn(number, replica):
    """Return a batch whose form differs in each step and on each replica."""
    return {"x": noise(10 * number + replica), **FORMS[(number + replica) % len(FORMS)]}


SETTINGS = {
    "pp2": Setting(HybridParallelPlugin, {"pp_size": 2}, 2),
    "pp4": Setting(HybridParallelPlugin, {"pp_size": 4, "zero_stage": 1}, 4),
    "pp2dp2": Setting(HybridParallelPlugin, {"pp_size": 2, "zero_stage": 2}, 4),
    "zbv": Setting(HybridParallelPlugin, {"pp_size": 2, "pp_style": "zbv"}, 2),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_each_form_of_batch_equals_one_process(name):
    setting = SETTINGS[name]
    setting.options["example_batch"] = {"x": noise(0)}
    assert_equals_one_process(Case(build=Net, batch=batch_of_turn, loss=loss_of, steps=len(FORMS)), setting)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 16, "vocab_size": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def tokens(number, replica):
    """Return a batch that asks for all hidden states from the third step on."""
    ids = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(number + 100 * replica))
    batch = {"input_ids": ids, "labels": ids}
    return {**batch, "output_hidden_states": True} if number > 1 else batch


def loss_with_states(outputs, _batch):
    return outputs.loss + 1e-2 * sum(each.square().mean() for each in outputs.hidden_states or ())


@pytest.mark.parametrize("pp_size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_hidden_states_that_are_asked_for_in_the_third_step(pp_size):
    setting = Setting(HybridParallelPlugin, {"pp_size": pp_size}, pp_size)
    assert_equals_one_process(Case(build=gpt2, batch=tokens, loss=loss_with_states, steps=4), setting)


def run_other_layers():
    booster = Booster("cpu", plugin=HybridParallelPlugin(pp_size=2, example_batch={"x": noise(0)}))
    torch.manual_seed(0)
    net = Net()
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))

    def step(batch):
        return booster.execute_pipeline(iter([batch]), model, loss_of, optimizer, return_loss=True)["loss"]

    before = step({"x": noise(1)})
    optimizer.zero_grad()
    with pytest.raises(ConfigError, match=r"Net calls 'layers\.3' as its layer number 2 for a batch of this form, and"):
        step({"x": noise(1), "skips": True})
    after = step({"x": noise(1)})
    return before, after


def test_a_form_that_calls_other_layers_raises_on_every_rank_and_loses_nothing():
    (_, _), (before, after) = run_on_ranks(run_other_layers, 2)
    assert torch.equal(before, after)


def evaluate_forms():
    booster = Booster("cpu", plugin=HybridParallelPlugin(pp_size=2, example_batch={"x": noise(0)}))
    torch.manual_seed(0)
    net = Net()
    plain = [net.eval()(x=noise(number), **form) for number, form in enumerate(FORMS)]
    model = booster.boost(net.train())[0]
    model.eval()
    pairs = []
    for number, form in enumerate(FORMS):
        batch = {"x": noise(number), **form}
        result = booster.execute_pipeline(iter([batch]), model, loss_of, None, return_outputs=True)
        if result["outputs"] is not None:
            pairs.append((dict(tensors_of(result["outputs"])), dict(tensors_of(plain[number]))))
    return pairs


def test_outputs_of_each_form_in_evaluation():
    _, pairs = run_on_ranks(evaluate_forms, 2)
    assert len(pairs) == len(FORMS)
    for found, plain in pairs:
        torch.testing.assert_close(found, plain)
