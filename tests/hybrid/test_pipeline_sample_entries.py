"""Which tensors of a batch are cut into microbatches: those that have shown to be for each sample."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from booster_core.errors import ConfigError
from booster_hybrid.pipeline.example import BatchDimensions, lengths_of


class Model(nn.Module):
    def forward(self, x, times=None):
        return x


def batch(count, **more):
    return {"x": torch.zeros(count, 3), "labels": torch.zeros(count, dtype=torch.int64), **more}


def weights(length):
    return {"weights": torch.ones(length)}


@pytest.mark.parametrize("example", [{"x": torch.zeros(2, 3)}, batch(4)], ids=["inputs", "same size"])
def test_vectors_of_the_criterion_are_refused_where_no_other_size_was_seen(example):
    entries = BatchDimensions(Model(), [lengths_of(example)])
    with pytest.raises(ConfigError, match=r"\['weights'\] of shape \(4,\) may have an .*`example_batch`"):
        entries.check(batch(4, **weights(4)), 4)


def test_vectors_that_have_grown_with_the_batch_are_cut():
    entries = BatchDimensions(Model(), [lengths_of(batch(2, **weights(2)))])
    for count in (4, 4, 3, 2):
        entries.check(batch(count, **weights(count)), count)


def test_vectors_that_have_not_grown_with_the_batch_are_refused():
    entries = BatchDimensions(Model(), [lengths_of(batch(2, **weights(4)))])
    message = r"\['weights'\] has 4 entries in batches in which \['x'\] has 2 and 4\..*belongs into the criterion"
    with pytest.raises(ConfigError, match=message):
        entries.check(batch(4, **weights(4)), 4)


def test_integers_that_have_not_grown_with_the_batch_are_refused():
    table = {"groups": torch.arange(4)}
    entries = BatchDimensions(Model(), [lengths_of(batch(2, **table))])
    with pytest.raises(ConfigError, match=r"\['groups'\] has 4 entries"):
        entries.check(batch(4, **table), 4)


@pytest.mark.parametrize(
    "given",
    [
        torch.zeros(4, 3),
        torch.zeros(4),
        batch(4),
        batch(4, target=torch.zeros(4, 3)),
        batch(4, scale=torch.tensor(2.0), shared=torch.zeros(1, 3), table=torch.zeros(7)),
        [torch.zeros(4, 3), torch.zeros(4, 3)],
    ],
    ids=["one tensor", "one vector", "labels", "like the input", "not cut", "inputs"],
)
def test_inputs_labels_and_what_is_not_cut_need_no_other_size(given):
    BatchDimensions(Model(), []).check(given, 4)


def test_vectors_that_forward_takes_need_another_size():
    entries = BatchDimensions(Model(), [lengths_of({"x": torch.zeros(2, 3)})])
    with pytest.raises(ConfigError, match=r"\['times'\] of shape \(4,\)"):
        entries.check(batch(4, times=torch.zeros(4)), 4)
    known = BatchDimensions(Model(), [lengths_of({"x": torch.zeros(2, 3), "times": torch.zeros(2)})])
    known.check(batch(4, times=torch.zeros(4)), 4)
