"""Which tensors of a batch are cut into microbatches: those that are seen to be for each sample."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin, ShardingPolicy
from booster_hybrid.pipeline.example import BatchDimensions, lengths_of
from booster_runtime import evaluate_batch, full_gradient, train_batch
from booster_testing import expect_on_ranks, run_on_ranks


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


# ---- on ranks


CLASSES = 4


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(CLASSES, CLASSES) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def of_classes(outputs, batch):
    """Weigh samples by their classes: the weights are as long as the batch, and not for its samples."""
    losses = functional.cross_entropy(outputs, batch["labels"], reduction="none")
    return (losses * batch["weights"][batch["labels"] % len(batch["weights"])]).mean()


def of_targets(outputs, batch):
    return ((outputs - batch["targets"][:, None]).square().mean(-1) * batch["weights"]).mean()


def some_batch(count):
    x = torch.randn(count, CLASSES, generator=torch.Generator().manual_seed(count))
    return {
        "x": x,
        "labels": torch.arange(count) % CLASSES,
        "targets": x.sum(-1),
        "weights": torch.linspace(1, 2, count),
    }


def endless():
    while True:
        yield some_batch(4)


def make():
    torch.manual_seed(3)
    return Stack()


def run(call, criterion, example):
    plugin = HybridParallelPlugin(pp_size=2, custom_policy=ShardingPolicy(layers=("layers",)), example_batch=example)
    booster = Booster("cpu", plugin=plugin)
    model = make()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if call == "train_batch":
        train_batch(booster, endless(), model, criterion, optimizer)
    elif call == "evaluate_batch":
        evaluate_batch(booster, endless(), model, criterion)
    else:
        booster.execute_pipeline(endless(), model, criterion, optimizer)
    return {name: full_gradient(booster, model, name) for name, _ in make().named_parameters()}


@pytest.mark.parametrize("call", ["execute_pipeline", "train_batch", "evaluate_batch"])
def test_vectors_of_an_iterator_that_may_be_for_all_samples_are_refused(call):
    message = r"\['targets'\] of shape \(4,\) may have an entry for each sample.*Pass the data loader to `boost`"
    expect_on_ranks(ConfigError, message, run, 2, call, of_classes, torch.ones(2, CLASSES))


def test_vectors_that_the_example_shows_to_be_for_samples_train_as_one_process():
    whole, batch = make(), some_batch(4)
    of_targets(whole(batch["x"]), batch).backward()
    for found in run_on_ranks(run, 2, "execute_pipeline", of_targets, some_batch(2)):
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, msg=name)
