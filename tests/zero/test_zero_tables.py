"""Gradients of large embeddings, of which ranks send the rows that a batch touches."""

import contextlib
from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import Case, itself, train_plainly
from matrix import matrix, named
from torch import nn

from booster_core import Booster
from booster_runtime import full_gradient
from booster_runtime.collectives import sums
from booster_testing import run_on_ranks
from booster_testing.compare import EXACT, assert_same_tensors
from booster_zero import LowLevelZeroPlugin

ROWS, WIDTH = 8192, 128
"""As many bytes as the least table has whose rows are looked for."""


class Classifier(nn.Module):
    """Looks tokens up in two tables; may use all of one besides, as a head that nothing declares."""

    def __init__(self, *, uses_all):
        super().__init__()
        self.table, self.head = nn.Embedding(ROWS, WIDTH, padding_idx=0), nn.Linear(WIDTH, 4)
        self.other = nn.Embedding(ROWS, WIDTH)
        self.uses_all = uses_all

    def forward(self, tokens):
        scores = self.head((self.table(tokens) * self.other(tokens + 1)).mean(1)).square().mean()
        return scores + self.table.weight.square().mean() if self.uses_all else scores


def tokens_of(number, replica):
    return torch.randint(40, (2, 8), generator=torch.Generator().manual_seed(10 * number + replica)) * 200


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def case_of(*, uses_all, accumulates):
    settings = {"loss": itself, "optimizer": momentum, "steps": 2, "max_norm": None}
    build = partial(Classifier, uses_all=uses_all)
    return Case(build=build, batch=tokens_of, micro_batches=2 if accumulates else 1, **settings)


def train(options, case, *, sends_all=False):
    """Return the gradients of each step, and the bytes that this rank sent in its last backward."""
    sent, send, gradients = [], dist.isend, []

    def counting(tensor, *args, **kwargs):
        sent.append(tensor.nbytes)
        return send(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", counting)
        if sends_all:
            patch.setattr(sums, "touched_rows", lambda _: None)
        booster = Booster("cpu", plugin=LowLevelZeroPlugin(**options))
        model, optimizer, *_ = booster.boost(*case.make())
        for step in range(case.steps):
            sent.clear()
            for number in range(step * case.micro_batches, (step + 1) * case.micro_batches):
                is_last = (number + 1) % case.micro_batches == 0
                with contextlib.nullcontext() if is_last else booster.no_sync(model, optimizer):
                    loss = model(tokens_of(number, dist.get_rank())) / case.micro_batches
                    booster.backward(loss, optimizer)
            num_bytes = sum(sent)
            names = [name for name, _ in model.unwrap().named_parameters()]
            gradients.append({name: full_gradient(booster, model, name) for name in names})
            optimizer.step()
            optimizer.zero_grad()
    return gradients, num_bytes


@matrix(1, uses_all=[False, True], accumulates=[False, True], options=named([{"stage": 1}, {"stage": 2}], str))
def test_gradients_of_a_table_are_those_of_one_process(options, accumulates, uses_all):
    case = case_of(uses_all=uses_all, accumulates=accumulates)
    expected = train_plainly(case, 2).gradients
    touched = run_on_ranks(train, 2, options, case)
    whole = run_on_ranks(train, 2, options, case, sends_all=True)
    table_bytes = ROWS * WIDTH * 4
    for (gradients, _), (others, _) in zip(touched, whole, strict=True):
        for found, other, plain in zip(gradients, others, expected, strict=True):
            assert_same_tensors(found, other, EXACT)
            for name, gradient in plain.items():
                torch.testing.assert_close(found[name], gradient)
    # A rank may hold all of one table, for which the other ranks send.
    num_bytes, whole_bytes = (sum(sent for _, sent in found) for found in (touched, whole))
    assert whole_bytes > 2 * table_bytes
    if uses_all:
        assert num_bytes > table_bytes
    else:
        assert num_bytes < 0.05 * table_bytes
