"""Sparse gradients of embedding tables are averaged in every step, and stay sparse."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from cases import Case, own_loss, train_plainly
from torch import nn

from booster_core import Booster
from booster_core.errors import GradientError
from booster_testing import RankError, run_on_ranks
from booster_testing.compare import assert_same_tensors


class Table(nn.Module):
    """A table with sparse gradients that is used for some batches only."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, tokens):
        return self.bias + (self.table(tokens).sum(1) if len(tokens[0]) else torch.zeros(len(tokens), 4))


def on_all(number, replica):
    return torch.randint(10, (3, 2), generator=torch.Generator().manual_seed(10 * number + replica))


def on_first(number, replica):
    return torch.empty(3, 0, dtype=torch.int64) if replica else on_all(number, replica)


def compare_with_one_process(batch, find_unused_parameters, *, under_no_sync):
    from booster_ddp import TorchDDPPlugin

    case = Case(build=Table, batch=batch, max_norm=None)
    expected = train_plainly(case, 2)
    booster = Booster("cpu", plugin=TorchDDPPlugin(find_unused_parameters=find_unused_parameters))
    model, plain_optimizer = case.make()
    boosted, optimizer, *_ = booster.boost(model, plain_optimizer)
    for step in range(case.steps):
        with booster.no_sync(boosted) if under_no_sync else contextlib.nullcontext():
            booster.backward(own_loss(boosted(batch(step, dist.get_rank())), None), optimizer)
        optimizer.settle()
        assert model.table.weight.grad.is_sparse
        ours = {name: p.grad.to_dense() for name, p in model.named_parameters()}
        theirs = {name: gradient.to_dense() for name, gradient in expected.gradients[step].items()}
        assert_same_tensors(ours, theirs, case.tolerance)
        optimizer.step()
        optimizer.zero_grad()
    assert_same_tensors(model.state_dict(), expected.parameters, case.tolerance)


@pytest.mark.parametrize("find_unused_parameters", [None, False])
def test_sparse_gradients_equal_one_process(find_unused_parameters):
    run_on_ranks(compare_with_one_process, 2, on_all, find_unused_parameters, under_no_sync=False)


def test_sparse_gradient_of_one_rank_is_averaged_with_zeros_under_no_sync():
    run_on_ranks(compare_with_one_process, 2, on_first, None, under_no_sync=True)


def used_on_one_rank_outside_of_no_sync():
    from booster_ddp import TorchDDPPlugin

    model = Table()
    booster = Booster("cpu", plugin=TorchDDPPlugin(find_unused_parameters=True))
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.backward(own_loss(boosted(on_first(0, dist.get_rank())), None), optimizer)


def test_sparse_gradient_that_ddp_can_not_average_names_no_sync():
    with pytest.raises(RankError) as caught:
        run_on_ranks(used_on_one_rank_outside_of_no_sync, 2)
    assert isinstance(caught.value.__cause__, GradientError)
    assert "sparse gradients was not used on this rank" in str(caught.value.__cause__)
    assert "`booster.no_sync`" in str(caught.value.__cause__)
