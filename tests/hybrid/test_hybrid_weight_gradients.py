"""Backward in two phases gives the gradients of backward in one, and runs every hook of a parameter once."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from matrix import matrix
from model_zoo import get_model
from ranked import on_ranks
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from booster_hybrid.mesh import AloneRank, RankGroup
from booster_hybrid.pipeline.weight_gradients import SplitBackward
from booster_hybrid.policy.find import policy_for
from booster_hybrid.sequence_parallel.split_gather import split_between_blocks
from booster_hybrid.tensor_parallel.linear import ColumnForward, ColumnSiblings, RowForward
from booster_hybrid.tensor_parallel.plan import parallelize
from booster_runtime.activations import enable_activation_checkpointing

MODELS = ("llama", "llama_tied", "deepseek_v3", "gpt2_lm", "t5_generation", "vit_classification", "whisper_generation")


def count_hooks(model):
    """Return how often each parameter's gradient has been accumulated; filled while backward runs."""
    fired = Counter()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.update([name]))
    return fired


def backward_in_two(split, compute, between=None):
    """Run a loss's backward in its two phases; return the loss, and what is asked for between them."""
    pending = split.begin(0)
    with split.using(pending):
        loss = compute()
        with pending.opened():
            loss.backward()
    asked = None if between is None else between()
    roots = pending.roots()
    torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])
    return loss, asked


def assert_gradients_of_one_backward(name, model, whole, dtype=torch.float32):
    """Train one of two equal models by a backward in two phases, microbatch by microbatch, the other one by one."""
    zoo = get_model(f"transformers/{name}")
    split = SplitBackward(model)
    fired, expected = count_hooks(model), count_hooks(whole)
    for microbatch in range(3):
        batch = zoo.share(0, microbatch, 3)

        def compute(each, batch=batch):
            with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
                return zoo.loss_of(each, batch)

        whole.zero_grad()
        loss = compute(whole)
        loss.backward()
        model.zero_grad()
        found, waiting = backward_in_two(split, lambda: compute(model), lambda: without_gradients(model))
        assert torch.equal(found, loss)
        assert waiting > without_gradients(whole)
        for key, parameter in whole.named_parameters():
            got = model.get_parameter(key).grad
            assert (got is None) == (parameter.grad is None), key
            if got is not None:  # what comes from several uses is summed in another order
                torch.testing.assert_close(
                    got, parameter.grad, rtol=1e-5, atol=1e-7, msg=lambda text, key=key: f"{key}: {text}"
                )
    assert fired == expected


def without_gradients(model):
    return {name for name, parameter in model.named_parameters() if parameter.grad is None}


@pytest.mark.parametrize("name", MODELS)
def test_models_get_the_gradients_of_one_backward(name):
    zoo = get_model(f"transformers/{name}")
    assert_gradients_of_one_backward(name, zoo.seeded(), zoo.seeded())


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return self.down(functional.gelu(self.up(self.norm(x))))


@pytest.fixture
def source():
    return torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(1))


def test_split_layers_take_their_input_by_name(source):
    group = AloneRank(None, 0, 1)
    for make in (RowForward, lambda layer, group: ColumnForward(layer, ColumnSiblings([layer], group), group)):
        layer = nn.Linear(8, 4)
        expected = layer(source)
        layer.forward = make(layer, group)
        assert torch.equal(layer(input=source), expected)


def test_no_gradient_is_deferred_outside_of_a_microbatch(source):
    model = Layers()
    SplitBackward(model)
    model(source.requires_grad_()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


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


def under_autocast(model, x, *, dtype):
    with torch.autocast("cpu", dtype):
        return model(x).float().square().sum()


def with_a_backward_inside(model, x):
    outputs = model(x)
    (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    return outputs.square().sum() + slope.square().sum()


LOSSES = {
    "once": lambda model, x: model(x).square().sum(),
    "used twice": lambda model, x: model(model(x)).square().sum(),
    "recomputed": lambda model, x: checkpoint(model, x, use_reentrant=False).square().sum(),
    "recomputed by reentrance": lambda model, x: checkpoint(model, x, use_reentrant=True).square().sum(),
    "bf16": partial(under_autocast, dtype=torch.bfloat16),
    "fp16": partial(under_autocast, dtype=torch.float16),
    "with a backward inside": with_a_backward_inside,
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_other_uses_are_those_of_one_backward(source, name):
    model, whole = Layers(), Layers()
    fired, expected = count_hooks(model), count_hooks(whole)
    x, y = source.clone().requires_grad_(), source.clone().requires_grad_()
    backward_in_two(SplitBackward(model), lambda: LOSSES[name](model, x))
    LOSSES[name](whole, y).backward()
    assert fired == expected or name == "with a backward inside"  # whose weights have another use
    # What comes from several uses is summed in another order.
    bound = {} if name in ("used twice", "with a backward inside") else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(x.grad, y.grad, **bound)
    for key, parameter in whole.named_parameters():
        torch.testing.assert_close(model.get_parameter(key).grad, parameter.grad, **bound)


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


# ---- layers that are split over ranks


def freeze(model):
    """Freeze every other parameter."""
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 2 == 0)


CASES = {
    **{name: (2, name, {}) for name in ("llama", "llama_tied", "gpt2_lm", "falcon", "t5_generation")},
    "keys that ranks share": (3, "llama", {}),
    "bf16": (2, "gpt2_lm", {"dtype": torch.bfloat16}),
    "fp16": (2, "gpt2_lm", {"dtype": torch.float16}),
    "frozen": (2, "llama", {"before": freeze}),
    "recomputed": (2, "llama", {"before": enable_activation_checkpointing}),
    "between split sequences": (2, "llama", {"is_sequence_split": True}),
}
DEFAULT = ["falcon", *list(CASES)[5:]]


@matrix(DEFAULT, case=CASES)
@on_ranks(lambda case: CASES[case][0])
def test_deferred_gradients_of_split_layers_equal_those_of_one_backward(case):
    _, name, options = CASES[case]
    models = [get_model(f"transformers/{name}").seeded() for _ in range(2)]
    for model in models:
        if "before" in options:
            options["before"](model)
        policy, group = policy_for(model), RankGroup.of(None)
        split = parallelize(model, policy, group, parallel_output=False)
        if "is_sequence_split" in options:
            split_between_blocks(model, policy.layers, group, split)
    assert_gradients_of_one_backward(name, *models, options.get("dtype", torch.float32))
