"""Backward in two phases gives the gradients of backward in one, and runs every hook of a parameter once."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from counted_hooks import count_hooks
from model_zoo import get_model
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from booster_hybrid.pipeline.weight_gradients import SplitBackward

MODELS = (
    "llama",
    "llama_tied",
    "mixtral",
    "gemma",
    "deepseek_v3",
    "falcon",
    "gpt2_lm",
    "opt",
    "bloom",
    "bert_masked_lm",
    "t5_generation",
    "vit_classification",
    "whisper_generation",
)


def backward_in_two(split, compute):
    """Run a loss's backward in its two phases."""
    pending = split.begin(0)
    with split.using(pending):
        loss = compute()
        with pending.opened():
            loss.backward()
    roots = pending.roots()
    torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])


@pytest.mark.parametrize("name", MODELS)
def test_models_get_the_gradients_of_one_backward(name):
    zoo = get_model(f"transformers/{name}")
    whole = zoo.seeded()
    model = copy.deepcopy(whole)
    split = SplitBackward(model)
    fired, expected = count_hooks(model), count_hooks(whole)
    for microbatch in range(3):
        batch = zoo.share(0, microbatch, 3)
        zoo.loss_of(whole, batch).backward()
        backward_in_two(split, lambda batch=batch: zoo.loss_of(model, batch))
    assert fired == expected
    for key, parameter in whole.named_parameters():
        got = model.get_parameter(key).grad
        if parameter.grad is None:
            assert got is None
        else:
            # What comes from several uses is summed in another order.
            torch.testing.assert_close(
                got, parameter.grad, rtol=1e-5, atol=1e-7, msg=lambda text, key=key: f"{key}: {text}"
            )


class Layers(nn.Module):
    def __init__(self, *, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16, bias=bias)
        self.down = nn.Linear(16, 8, bias=bias)

    def forward(self, x):
        return self.down(functional.gelu(self.up(self.norm(x))))


@pytest.fixture
def source():
    return torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bias", [True, False])
def test_deferred_linear_gradients_are_bitwise_equal(source, bias):
    model, whole = Layers(bias=bias), Layers(bias=bias)
    split = SplitBackward(model)
    pending = split.begin(0)
    x, y = source.clone().requires_grad_(), source.clone().requires_grad_()
    with split.using(pending):
        loss = model(x).square().sum()
        with pending.opened():
            loss.backward()
    whole(y).square().sum().backward()
    assert [key for key, each in model.named_parameters() if each.grad is not None] == ["norm.weight", "norm.bias"]
    assert torch.equal(x.grad, y.grad)
    roots = pending.roots()
    torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])
    for key, parameter in whole.named_parameters():
        assert torch.equal(model.get_parameter(key).grad, parameter.grad), key


def test_no_gradient_is_deferred_outside_of_a_microbatch(source):
    model = Layers()
    SplitBackward(model)
    model(source.requires_grad_()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_frozen_parameters_get_no_gradient(source):
    model = Layers()
    model.up.weight.requires_grad_(False)
    model.down.bias.requires_grad_(False)
    backward_in_two(SplitBackward(model), lambda: model(source).sum())
    assert {key for key, each in model.named_parameters() if each.grad is None} == {"up.weight", "down.bias"}


def test_a_tensor_hook_sees_the_sum_of_all_uses_once(source):
    model, whole = Layers(), Layers()
    seen: list = [[], []]
    for each, to in zip((model, whole), seen, strict=True):
        each.up.weight.register_hook(lambda gradient, to=to: to.append(gradient.clone()) or 2 * gradient)
    backward_in_two(SplitBackward(model), lambda: torch.add(model(source), model(source + 1)).sum())
    torch.add(whole(source), whole(source + 1)).sum().backward()
    assert [len(to) for to in seen] == [1, 1]
    assert torch.equal(seen[0][0], seen[1][0])
    assert torch.equal(model.up.weight.grad, whole.up.weight.grad)


def test_a_layer_that_is_used_twice_gets_its_gradient_once(source):
    model, whole = Layers(), Layers()
    fired, expected = count_hooks(model), count_hooks(whole)
    backward_in_two(SplitBackward(model), lambda: model(model(source)).square().sum())
    whole(whole(source)).square().sum().backward()
    assert fired == expected
    for key, parameter in whole.named_parameters():
        torch.testing.assert_close(model.get_parameter(key).grad, parameter.grad)


def test_a_weight_with_another_use_is_no_longer_deferred(source):
    model, whole = Layers(), Layers()
    split = SplitBackward(model)

    def loss_of(model):
        return model(source).square().sum() + model.up.weight.square().sum()

    fired = count_hooks(model)
    for _ in range(3):
        backward_in_two(split, lambda: loss_of(model))
        loss_of(whole).backward()
    assert fired["down.weight"] == 3
    # In the first microbatch its penalty's gradient came before anybody knew of the other.
    assert fired["up.weight"] in (3, 4)
    for key, parameter in whole.named_parameters():
        torch.testing.assert_close(model.get_parameter(key).grad, parameter.grad)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_layers_defer_their_gradients(source, use_reentrant):
    model, whole = Layers(), Layers()
    fired, expected = count_hooks(model), count_hooks(whole)

    def loss_of(model):
        x = source.clone().requires_grad_()
        return checkpoint(model, x, use_reentrant=use_reentrant).square().sum()

    backward_in_two(SplitBackward(model), lambda: loss_of(model))
    loss_of(whole).backward()
    assert fired == expected
    for key, parameter in whole.named_parameters():
        assert torch.equal(model.get_parameter(key).grad, parameter.grad), key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_the_same_products(source, dtype):
    model, whole = Layers(), Layers()

    def loss_of(model):
        with torch.autocast("cpu", dtype):
            return model(source.clone().requires_grad_()).float().square().sum()

    backward_in_two(SplitBackward(model), lambda: loss_of(model))
    loss_of(whole).backward()
    for key, parameter in whole.named_parameters():
        assert torch.equal(model.get_parameter(key).grad, parameter.grad), key


def test_a_backward_inside_the_forward_leaves_no_deferred_gradients(source):
    model, whole = Layers(), Layers()

    def loss_of(model):
        x = source.clone().requires_grad_()
        outputs = model(x)
        (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        return outputs.square().sum() + slope.square().sum()

    backward_in_two(SplitBackward(model), lambda: loss_of(model))
    loss_of(whole).backward()
    for key, parameter in whole.named_parameters():
        torch.testing.assert_close(model.get_parameter(key).grad, parameter.grad)


class Probe(torch.autograd.Function):
    """Keeps a tensor for backward and tells whether it is still there."""

    @staticmethod
    def forward(ctx, x, kept):
        saved = x.clone()
        kept.append(weakref.ref(saved))
        ctx.save_for_backward(saved)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        assert ctx.saved_tensors
        return gradient, None


def test_unneeded_activations_are_freed_after_the_input_backward(source):
    model, kept = Layers(), []
    split = SplitBackward(model)
    pending = split.begin(0)
    with split.using(pending):
        loss = Probe.apply(model(source), kept).sum()
        assert kept[0]() is not None
        with pending.opened():
            loss.backward()
    assert kept[0]() is None
    assert pending.accepted


def test_no_product_is_computed_twice(source):
    model = Layers()
    split = SplitBackward(model)
    pending = split.begin(0)
    product = 2 * source.numel() * 16  # of either layer, in each direction
    with split.using(pending):
        loss = model(source.requires_grad_()).sum()
        with FlopCounterMode(display=False) as first, pending.opened():
            loss.backward()
    roots = pending.roots()
    with FlopCounterMode(display=False) as second:
        torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])
    assert (first.get_total_flops(), second.get_total_flops()) == (2 * product, 2 * product)
