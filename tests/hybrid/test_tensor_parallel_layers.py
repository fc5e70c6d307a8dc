"""Split linear layers on their own: what they compute, what they skip, what they keep, and when they send."""

import contextlib
import copy
import gc
import weakref
from functools import partial
from unittest import mock

import pytest
import torch
from model_parity import assert_parts_of_gradients
from ranked import on_ranks, raises_on_ranks
from torch import nn
from transformers.pytorch_utils import Conv1D

from booster_core.errors import GradientError
from booster_hybrid.mesh import RankGroup
from booster_hybrid.policy.base import ModuleRule, ShardingPolicy, Style
from booster_hybrid.tensor_parallel import linear
from booster_hybrid.tensor_parallel.plan import parallelize
from booster_runtime import collectives

WIDTH, HEADS = 16, 4


def make_linear(kind, num_outputs):
    if kind != "conv":
        return nn.Linear(WIDTH, num_outputs, bias=kind == "bias")
    layer = Conv1D(num_outputs, WIDTH)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.1)
    return layer


class Attention(nn.Module):
    def __init__(self, kind="bias"):
        super().__init__()
        self.q, self.k, self.v, self.out = (make_linear(kind, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            each.view(*each.shape[:-1], -1, WIDTH // HEADS).transpose(-2, -3)
            for each in (self.q(x), self.k(x), self.v(x))
        )
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2))


class Block(nn.Module):
    def __init__(self, kind="bias"):
        super().__init__()
        self.attention = Attention(kind)

    def forward(self, x):
        return x + self.attention(x)


class Stack(nn.Module):
    def __init__(self, kind="bias", depth=2):
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


POLICY = ShardingPolicy(
    rules=(
        *(ModuleRule(f"blocks.*.attention.{name}", Style.COLUMN, HEADS) for name in "qkv"),
        ModuleRule("blocks.*.attention.out", Style.ROW, HEADS),
    )
)


def make(kind="bias", depth=2, dtype=torch.float64, before=None):
    """Return a whole model, the split one, and which part of each parameter is here."""
    torch.manual_seed(0)
    whole = Stack(kind, depth).to(dtype)
    if before is not None:
        before(whole)
    model = copy.deepcopy(whole)
    split = parallelize(model, POLICY, RankGroup.of(None))
    return whole, model, split.splits


def batch(dtype=torch.float64, seed=1):
    return torch.randn(2, 5, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(seed))


same_gradients = partial(assert_parts_of_gradients, relative=1e-12)


@contextlib.contextmanager
def counted_sums():
    """Yield a list that gets the number of elements of each sum over ranks."""
    numels = []
    with mock.patch.object(collectives, "all_reduce", wraps=collectives.all_reduce) as sums:
        yield numels
    numels += [call.args[0].numel() for call in sums.call_args_list]


# ---- what they compute


@pytest.mark.parametrize("kind", ["bias", "plain", "conv"])
@on_ranks(2)
def test_outputs_may_be_written_to(kind):
    whole, model, splits = make(kind, depth=1)
    for each in (whole, model):
        attention = each.blocks[0].attention
        x = batch().requires_grad_()
        query, key, value = attention.q(x), attention.k(x), attention.v(x)
        query.mul_(2.0)
        output = attention.out(query * key + value)
        output += x
        output.square().sum().backward()
    same_gradients(model, splits, whole)


@raises_on_ranks(GradientError, r"no second derivative.*`create_graph=True`.*tp_size=1", 2)
def test_second_derivatives_are_refused():
    _, model, _ = make()
    source = batch().requires_grad_()
    torch.autograd.grad(model(source).sum(), source, create_graph=True)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@on_ranks(2)
def test_column_siblings_share_nothing_without_gradients(mode):
    whole, model, _ = make()
    with counted_sums() as numels, mode():
        torch.testing.assert_close(model(batch()), whole(batch()))
        siblings = model.blocks[0].attention.q.forward.siblings
        assert siblings._open is None
    assert numels == [2 * 5 * WIDTH] * 2  # the rows' sums alone
    source, other = (batch().requires_grad_() for _ in range(2))
    whole(source).sum().backward()
    model(other).sum().backward()
    torch.testing.assert_close(other.grad, source.grad)


# ---- what they skip


@pytest.mark.parametrize(
    ("names", "num_computed"), [(["weight"], 0), (["q.", "k."], 4), (["out.weight"], 6), (["bias"], 8), (["blocks"], 0)]
)
@on_ranks(2)
def test_gradients_of_frozen_weights_are_not_computed(names, num_computed):
    def freeze(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in names))

    whole, model, splits = make(before=freeze)
    source, other = (batch().requires_grad_() for _ in range(2))
    with mock.patch.object(linear, "_weight_gradient", wraps=linear._weight_gradient) as computed:
        whole(source).square().sum().backward()
        model(other).square().sum().backward()
    same_gradients(model, splits, whole)
    torch.testing.assert_close(other.grad, source.grad)
    assert computed.call_count == num_computed


@on_ranks(2)
def test_an_input_without_gradient_sends_nothing_in_backward():
    """One sum in forward remains."""
    whole, model, splits = make(depth=1)
    with counted_sums() as numels:
        whole(batch()).square().sum().backward()
        model(batch()).square().sum().backward()
    same_gradients(model, splits, whole)
    assert len(numels) == 1


@pytest.mark.parametrize("kind", ["bias", "conv"])
@on_ranks(2)
def test_three_projections_share_one_sum(kind):
    """Three layers: one sum in forward and one in backward each."""
    _, model, _ = make(kind, depth=3)
    source = batch().requires_grad_()
    with counted_sums() as numels:
        model(source).square().sum().backward()
    assert numels == [2 * 5 * WIDTH] * 6


# ---- what they keep


@pytest.mark.parametrize("changed", ["input", "weight"])
@on_ranks(2)
def test_what_was_written_to_is_computed_again(changed):
    whole, model, _ = make(depth=1)
    found = []
    for each in (whole, model):
        attention, source = each.blocks[0].attention, batch()
        first = attention.q(source)
        with torch.no_grad():
            (source if changed == "input" else attention.k.weight).mul_(3.0)
        found.append([part.detach() for part in (first, attention.k(source), attention.v(source))])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs.chunk(2, -1)[RankGroup.of(None).rank])


@on_ranks(2)
def test_unused_column_results_are_freed_in_backward():
    _, model, _ = make(depth=1)
    siblings = model.blocks[0].attention.q.forward.siblings
    source = batch().requires_grad_()
    middle = source * 1.0
    output = model.blocks[0].attention.q(middle)
    seen = weakref.ref(middle)
    del middle
    output.sum().backward()
    del output
    gc.collect()
    assert model.blocks[0].attention.k.weight.grad is None
    assert siblings._open is None
    assert seen() is None


# ---- when they send


@on_ranks(2)
def test_weight_gradients_are_computed_while_the_sum_travels():
    _, model, _ = make(depth=1)
    output = model(batch().requires_grad_())
    events = []

    def noted(*args, original=collectives.all_reduce, **options):
        """Start a sum that tells when it is waited for."""
        events.append("sum")
        pending = original(*args, **options)
        return mock.Mock(wait=lambda: events.append("wait") or pending.wait())

    def computed(*args, original=linear._weight_gradient, **options):
        events.append("weight")
        return original(*args, **options)

    gradients = mock.patch.object(linear, "_weight_gradient", computed)
    with gradients, mock.patch.object(collectives, "all_reduce", noted):
        output.sum().backward()
    assert events == ["weight", "sum", "weight", "weight", "weight", "wait"]
