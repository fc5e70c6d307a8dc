"""Gradients of large embeddings, of which ranks send the rows that a batch touches."""

import contextlib
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from cases import Case, Setting, itself, train_plainly
from driven_runs import Run
from matrix import matrix, named
from ranked import on_ranks
from torch import nn

from booster_runtime.collectives import sums
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


def train(case, options):
    """Return the gradients of each step, and the bytes that all ranks sent in the last backward."""
    run, gradients = Run(case, Setting(LowLevelZeroPlugin, options)), []
    for step in range(case.steps):
        with mock.patch.object(dist, "isend", wraps=dist.isend) as sends:
            for micro in range(case.micro_batches):
                with contextlib.nullcontext() if micro + 1 == case.micro_batches else run.no_sync():
                    run.backward(run.loss(step * case.micro_batches + micro) / case.micro_batches)
        gradients.append(run.gradients())
        run.step()
    num_bytes = torch.tensor(sum(call.args[0].nbytes for call in sends.call_args_list))
    dist.all_reduce(num_bytes)  # a rank may hold all of one table, for which the other ranks send
    return gradients, int(num_bytes)


@matrix(1, uses_all=[False, True], accumulates=[False, True], options=named([{"stage": 1}, {"stage": 2}], str))
@on_ranks(2)
def test_gradients_of_a_table_are_those_of_one_process(options, accumulates, uses_all):
    case = Case(
        build=partial(Classifier, uses_all=uses_all),
        batch=tokens_of,
        loss=itself,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        steps=2,
        micro_batches=2 if accumulates else 1,
        max_norm=None,
    )
    touched, num_bytes = train(case, options)
    with mock.patch.object(sums, "touched_rows", return_value=None):
        whole, whole_bytes = train(case, options)
    for found, other, plain in zip(touched, whole, train_plainly(case, 2).gradients, strict=True):
        assert_same_tensors(found, other, EXACT)
        torch.testing.assert_close(found, plain)
    table_bytes = ROWS * WIDTH * 4
    assert whole_bytes > 2 * table_bytes
    if uses_all:
        assert num_bytes > table_bytes
    else:
        assert num_bytes < 0.05 * table_bytes
