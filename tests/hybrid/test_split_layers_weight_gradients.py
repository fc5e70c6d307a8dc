"""Layers that are split over ranks leave their weights' gradients for later, as whole ones do."""

from __future__ import annotations

import pytest
import torch
from counted_hooks import count_hooks
from matrix import matrix
from model_zoo import get_model

from booster_hybrid.pipeline.weight_gradients import SplitBackward
from booster_hybrid.policy.find import policy_for
from booster_hybrid.rank_group import RankGroup
from booster_hybrid.sequence_parallel.split_gather import split_between_blocks
from booster_hybrid.tensor_parallel.linear import ColumnForward, RowForward
from booster_hybrid.tensor_parallel.plan import parallelize
from booster_runtime.activations import enable_activation_checkpointing
from booster_testing import run_on_ranks


def split_parameters(model):
    """Return the names of what the column- and row-parallel layers hold, and train without a sum of their own."""
    layers = {
        name: each
        for name, each in model.named_modules()
        if isinstance(split_forward(each), (ColumnForward, RowForward))
    }
    return {
        f"{layer}.{name}"
        for layer, module in layers.items()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad and any(parameter is each for each in used_by(module))
    }


def used_by(module):
    """Return what a split layer computes with: its parameters, or what sums the gradients of those that ranks share."""
    forward = split_forward(module)
    return forward.siblings.parameters(module) if isinstance(forward, ColumnForward) else (module.weight, module.bias)


def split_forward(module):
    return module.__dict__.get("forward")


def backward_in_two(model, split, compute):
    """Run both phases; return the names of the parameters that had no gradient between them, and the loss."""
    model.zero_grad()
    pending = split.begin(0)
    with split.using(pending):
        loss = compute()
        with pending.opened():
            loss.backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    roots = pending.roots()
    torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])
    return without, loss


def split_model(name, *, is_sequence_split=False, before=None):
    """Return a model whose layers are split, and what makes its backward wait."""
    zoo = get_model(f"transformers/{name}")
    model = zoo.seeded()
    if before is not None:
        before(model)
    policy, group = policy_for(model), RankGroup.of(None)
    split = parallelize(model, policy, group, parallel_output=False)
    if is_sequence_split:
        split_between_blocks(model, policy.layers, group, split)
    return zoo, model


def freeze(model):
    """Freeze every other parameter."""
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 2 == 0)


def recompute(model):
    enable_activation_checkpointing(model)


BEFORE = {"": None, "frozen": freeze, "recomputed": recompute}


def compare(name, options, dtype):
    """Both phases together give, bit for bit, what one backward gives, and what waits has nothing in between."""
    before = BEFORE[options.get("before", "")]
    is_sequence_split = options.get("is_sequence_split", False)
    zoo, model = split_model(name, is_sequence_split=is_sequence_split, before=before)
    _, whole = split_model(name, is_sequence_split=is_sequence_split, before=before)
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
        without, found = backward_in_two(model, split, lambda: compute(model))
        assert torch.equal(found, loss)
        waiting = split_parameters(model)
        used = {key for key, parameter in whole.named_parameters() if parameter.grad is not None}
        assert waiting & used <= without | also_tables(model)
        assert waiting & used & without
        for key, parameter in whole.named_parameters():
            got = model.get_parameter(key).grad
            assert (got is None) == (parameter.grad is None), key
            if got is not None:
                torch.testing.assert_close(
                    got, parameter.grad, rtol=1e-5, atol=1e-7, msg=lambda text, key=key: f"{key}: {text}"
                )
    assert fired == expected


def also_tables(model):
    """Return the names of weights that are used as tables, too, whose gradients come from there first."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    return {name for name, parameter in model.named_parameters() if id(parameter) in tables}


@matrix(["falcon"], name=["llama", "llama_tied", "gpt2_lm", "falcon", "t5_generation"])
def test_deferred_gradients_equal_those_of_one_backward(name):
    run_on_ranks(compare, 2, name, {}, torch.float32)


def test_shared_key_value_gradients_are_summed_at_once_and_queries_deferred():
    run_on_ranks(compare, 3, "llama", {}, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_the_same_products(dtype):
    run_on_ranks(compare, 2, "gpt2_lm", {}, dtype)


@pytest.mark.parametrize("before", ["frozen", "recomputed"])
def test_layers_may_be_frozen_or_recomputed(before):
    run_on_ranks(compare, 2, "llama", {"before": before}, torch.float32)


def test_gradients_of_layers_between_split_sequences_are_deferred():
    run_on_ranks(compare, 2, "llama", {"is_sequence_split": True}, torch.float32)
