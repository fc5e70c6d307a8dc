"""A loss over the routers of all layers, or over all hidden states, is that of one process under pipelines."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from cases import Case, Setting, assert_equals_one_process, itself
from matrix import matrix, named
from model_zoo import get_model

from booster_core import Booster
from booster_hybrid import HybridParallelPlugin, ShardingPolicy
from booster_runtime import full_gradient
from booster_testing import run_on_ranks

ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
STATES = {"output_hidden_states": True}
MICROBATCHES = 4


def deepened(name, settings):
    """Return a model of the zoo with four layers and other settings."""
    zoo = get_model(f"transformers/{name}")
    model = zoo.seeded()
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 4
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[0]] * 4
    for key, value in settings.items():
        setattr(config, key, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = type(model)(config).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return zoo, model


def of_model(outputs, batch):
    del batch
    return outputs.loss


def of_hidden_states(outputs, batch):
    """Take a loss of what all layers have in between."""
    del batch
    return sum((number + 1) * state.float().square().mean() for number, state in enumerate(outputs.hidden_states))


def compare(name, settings, options, criterion):
    zoo, whole = deepened(name, settings)
    batch = zoo.share(0, 0, 2 * MICROBATCHES)
    expected = 0.0
    for start in range(0, 2 * MICROBATCHES, 2):
        part = {key: value[start : start + 2] for key, value in batch.items()}
        loss = criterion(whole(**part), part) / MICROBATCHES
        loss.backward()
        expected += float(loss.detach())
    plugin = HybridParallelPlugin(num_microbatches=MICROBATCHES, example_batch=batch, **options)
    booster = Booster("cpu", plugin=plugin)
    _, model = deepened(name, settings)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    result = booster.execute_pipeline(iter([batch]), model, criterion, optimizer, return_outputs=True)
    if result["loss"] is not None:
        assert float(result["loss"]) == pytest.approx(expected, rel=1e-5)
        for field in ("hidden_states", "router_logits"):
            if getattr(whole.config, f"output_{field}", False):
                assert len(getattr(result["outputs"], field)) == 4 + (field == "hidden_states")
    for key, parameter in whole.named_parameters():
        if parameter.grad is not None:
            found = full_gradient(booster, model, key)
            # fp32, sums in another order.
            torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=2e-6, msg=f"{name}: {key}")
    dist.barrier()


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        pytest.param(4, {"pp_size": 4}, marks=pytest.mark.slow),
        (2, {"pp_size": 2, "pp_style": "zbv"}),
        pytest.param(4, {"pp_size": 2, "tp_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["pp4", "zbv", "tp2pp2"],
)
def test_all_routers_are_balanced(num_ranks, options):
    run_on_ranks(compare, num_ranks, "mixtral", ROUTED, options, of_model)


def test_routers_in_recomputed_layers_are_balanced():
    run_on_ranks(compare, 2, "mixtral", ROUTED, {"pp_size": 2, "checkpoint_ratio": 1.0}, of_model)


@pytest.mark.parametrize(
    "name",
    [pytest.param("llama", marks=pytest.mark.slow), "gpt2_lm", pytest.param("bert_masked_lm", marks=pytest.mark.slow)],
)
def test_hidden_states_of_all_layers_arrive(name):
    run_on_ranks(compare, 4, name, STATES, {"pp_size": 4}, of_hidden_states)


def test_hidden_states_and_routers_arrive_together():
    run_on_ranks(compare, 2, "mixtral", {**ROUTED, **STATES}, {"pp_size": 2, "pp_style": "zbv"}, of_hidden_states)


class Told(torch.nn.Module):
    """Layers whose inner results a hook collects, and which run with values alone."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([ToldLayer() for _ in range(4)])
        self.seen = []
        for layer in self.layers:
            layer.router.register_forward_hook(self.see)

    def see(self, _router, _args, output):
        self.seen.append(output)

    def forward(self, x):
        self.seen.clear()
        for layer in self.layers:
            x = layer(x)
        return x.square().mean() + sum(each.square().mean() for each in self.seen) / len(self.seen)


class ToldLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.out = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        scores = self.router(x)
        assert self.out.weight.abs().sum() > 0
        return x + self.out(x) * scores


def samples(number, replica):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(2 + 10 * number + replica))


def test_what_hooks_have_seen_of_a_layer_that_fails_without_values_counts_once():
    example = {"custom_policy": ShardingPolicy(layers=("layers",)), "example_batch": samples(0, 0)[:2]}
    setting = Setting(HybridParallelPlugin, {"pp_size": 2, **example})
    assert_equals_one_process(Case(build=Told, batch=samples, loss=itself, steps=2), setting)


def widen(_router, _args, output):
    return torch.cat([output, output], -1).double()


class Widened(torch.nn.Module):
    """Layers that run only with what a hook makes of an inner module's output, which is of another width and format."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([WidenedLayer() for _ in range(4)])
        for layer in self.layers:
            layer.router.register_forward_hook(widen)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x = x * (2 if x.dtype == torch.float64 else 3)
        return x.square().mean()


class WidenedLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.out = torch.nn.Linear(4, 2), torch.nn.Linear(4, 4)

    def forward(self, x):
        return x + self.out(x.float()) * self.router(x.float())


def test_hooks_may_change_what_modules_inside_of_layers_return():
    example = {"custom_policy": ShardingPolicy(layers=("layers",)), "example_batch": samples(0, 0)[:2]}
    setting = Setting(HybridParallelPlugin, {"pp_size": 2, **example})
    assert_equals_one_process(Case(build=Widened, batch=samples, loss=itself, steps=2), setting)


class Attach(torch.autograd.Function):
    """Lets a loss take part in backward without being in the loss, as DeepSeek's remote code does."""

    @staticmethod
    def forward(_ctx, hidden, _loss):
        return hidden.clone()

    @staticmethod
    def backward(_ctx, gradient):
        return gradient, torch.ones((), dtype=gradient.dtype)


class Attaching(torch.nn.Module):
    """Layers that attach the loss of their router, and a decay that a hook on a parameter adds."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([AttachingLayer() for _ in range(4)]).double()
        weight = self.layers[0].out.weight
        weight.register_hook(lambda gradient: gradient + 0.1 * weight.detach())

    def forward(self, x):
        for layer in self.layers:
            x = layer(x.double())
        return x.square().mean()


class AttachingLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.out = torch.nn.Linear(4, 3), torch.nn.Linear(4, 4)

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        return x + Attach.apply(self.out(x) * shares[..., :1], shares.square().sum(-1).mean())


@matrix(
    ["1f1b-0", "zbv-1", "1f1b-2"],
    style=named(
        [{"pp_style": style} for style in ("1f1b", "gpipe", "interleaved", "zbv")], lambda each: each["pp_style"]
    ),
    stage=[0, 1, 2, 3],
)
def test_what_joins_backward_without_the_loss_counts_once(style, stage):
    example = {"custom_policy": ShardingPolicy(layers=("layers",)), "example_batch": samples(0, 0)[:2]}
    options = {"pp_size": 2, "num_microbatches": 4, "zero_stage": stage, **style, **example}
    case = Case(build=Attaching, batch=samples, loss=itself, steps=2, micro_batches=2)
    assert_equals_one_process(case, Setting(HybridParallelPlugin, options))
