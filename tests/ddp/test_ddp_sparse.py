"""Sparse gradients of embedding tables are averaged in every step, and stay sparse."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from booster_core import Booster
from booster_core.errors import GradientError
from booster_testing import RankError, run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for


class Table(nn.Module):
    """A table with sparse gradients that is used for some batches only."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, tokens):
        return self.bias + (self.table(tokens).sum(1) if len(tokens[0]) else torch.zeros(len(tokens), 4))


def tokens_of(step, rank, *, is_used_on_all):
    if not is_used_on_all and rank:
        return torch.empty(3, 0, dtype=torch.int64)
    return torch.randint(10, (3, 2), generator=torch.Generator().manual_seed(10 * step + rank))


def train_plainly(model, is_used_on_all):
    optimizer, gradients = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        for rank in range(2):
            (model(tokens_of(step, rank, is_used_on_all=is_used_on_all)).square().mean() / 2).backward()
        gradients.append(dense(model))
        optimizer.step()
        optimizer.zero_grad()
    return gradients


def dense(model):
    return {name: p.grad.to_dense().clone() for name, p in model.named_parameters()}


def compare_with_one_process(*, is_used_on_all, find_unused_parameters):
    from booster_ddp import TorchDDPPlugin

    torch.manual_seed(0)
    model, plain = Table(), Table()
    plain.load_state_dict(model.state_dict())
    expected = train_plainly(plain, is_used_on_all)
    booster = Booster("cpu", plugin=TorchDDPPlugin(find_unused_parameters=find_unused_parameters))
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        tokens = tokens_of(step, dist.get_rank(), is_used_on_all=is_used_on_all)
        booster.backward(boosted(tokens).square().mean(), optimizer)
        assert model.table.weight.grad.is_sparse
        assert_same_tensors(dense(model), expected[step], tolerance_for(torch.float32))
        optimizer.step()
        optimizer.zero_grad()
    assert_same_tensors(model.state_dict(), plain.state_dict(), tolerance_for(torch.float32))


@pytest.mark.parametrize("find_unused_parameters", [None, False])
def test_sparse_gradients_equal_one_process(find_unused_parameters):
    run_on_ranks(compare_with_one_process, 2, is_used_on_all=True, find_unused_parameters=find_unused_parameters)


def used_on_one_rank():
    """Compare steps in which one rank does not use the table."""
    from booster_ddp import TorchDDPPlugin

    torch.manual_seed(0)
    model, plain = Table(), Table()
    plain.load_state_dict(model.state_dict())
    expected = train_plainly(plain, is_used_on_all=False)
    booster = Booster("cpu", plugin=TorchDDPPlugin())
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        tokens = tokens_of(step, dist.get_rank(), is_used_on_all=False)
        with booster.no_sync(boosted):
            booster.backward(boosted(tokens).square().mean(), optimizer)
        optimizer.settle()
        assert model.table.weight.grad.is_sparse
        assert_same_tensors(dense(model), expected[step], tolerance_for(torch.float32))
        optimizer.step()
        optimizer.zero_grad()


def test_sparse_gradient_of_one_rank_is_averaged_with_zeros_under_no_sync():
    run_on_ranks(used_on_one_rank, 2)


def used_on_one_rank_outside_of_no_sync():
    from booster_ddp import TorchDDPPlugin

    model = Table()
    booster = Booster("cpu", plugin=TorchDDPPlugin(find_unused_parameters=True))
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens = tokens_of(0, dist.get_rank(), is_used_on_all=False)
    booster.backward(boosted(tokens).square().mean(), optimizer)


def test_sparse_gradient_that_ddp_can_not_average_names_no_sync():
    with pytest.raises(RankError) as caught:
        run_on_ranks(used_on_one_rank_outside_of_no_sync, 2)
    assert isinstance(caught.value.__cause__, GradientError)
    assert "sparse gradients was not used on this rank" in str(caught.value.__cause__)
    assert "`booster.no_sync`" in str(caught.value.__cause__)
