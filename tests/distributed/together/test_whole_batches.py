"""`train_batch` and `evaluate_batch` run one loop under every plugin, and equal plain PyTorch on one large batch.

Batches have unequal numbers of counted labels on each rank, and in each part that a pipeline cuts them into.
"""

import pytest
import torch
from named_plugins import NAMES, make_model, plugin_named

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.models import TinyMLP
from booster_testing.training import whole_model

STEPS = 2
ACCUMULATION = 2
SAMPLES = 4
MAX_NORM = 0.3
LEARNING_RATE = 0.1
REPLICAS = {"single": 1, "hybrid-tp": 1, "hybrid-pp": 1}
"""Ranks with samples of their own, where it is not both."""


def batches_of(replica):
    """Return the batches of a replica for all steps; a third to all of their labels count."""
    draw = torch.Generator().manual_seed(replica)
    batches = []
    for index in range(STEPS * ACCUMULATION):
        ids = torch.randint(16, (SAMPLES, 6), generator=draw)
        labels = ids.clone()
        for sample in range(SAMPLES):
            labels[sample, 2 + (index + sample + replica) % 5 :] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def count_labels(batch):
    return (batch["labels"][:, 1:] != -100).sum()


def cross_entropy(outputs, batch, reduction="mean"):
    return torch.nn.functional.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction=reduction
    )


def train_plainly(replicas):
    """Return losses, the last step's loss of evaluation, and parameters of one process."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        batches = [
            batch for replica in range(replicas) for batch in batches_of(replica)[step * ACCUMULATION :][:ACCUMULATION]
        ]
        total = sum(count_labels(batch) for batch in batches)
        loss = sum(cross_entropy(model(input_ids=each["input_ids"]), each, "sum") for each in batches) / total
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    firsts = [batches_of(replica)[0] for replica in range(replicas)]
    with torch.no_grad():
        summed = sum(cross_entropy(model(input_ids=each["input_ids"]), each, "sum") for each in firsts)
    weight = float(sum(count_labels(each) for each in firsts))
    return losses, (float(summed) / weight, weight), {name: p.detach() for name, p in model.named_parameters()}


def train_by_whole_batches(name):
    model = make_model()
    booster = Booster(plugin=plugin_named(name))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
    index, _ = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    batches = iter(batches_of(index))
    losses = [
        booster.train_batch(
            batches,
            model,
            cross_entropy,
            optimizer,
            accumulation=ACCUMULATION,
            max_norm=MAX_NORM,
            weight=count_labels,
        ).item()
        for _ in range(STEPS)
    ]
    with pytest.raises(StopIteration):
        booster.train_batch(batches, model, cross_entropy, optimizer)
    model.train()
    evaluation = booster.evaluate_batch(iter(batches_of(index)), model, cross_entropy, weight=count_labels)
    assert model.training
    logits = None if evaluation.outputs is None else evaluation.outputs.logits.shape[0]
    return losses, (evaluation.loss.item(), evaluation.weight), whole_model(booster, model), logits


@pytest.mark.parametrize("name", NAMES)
def test_gradients_and_losses_are_those_of_one_large_batch(name):
    size = 1 if name == "single" else 2
    expected_losses, expected_evaluation, expected = train_plainly(REPLICAS.get(name, 2))
    results = run_on_ranks(train_by_whole_batches, size, name)
    for losses, evaluation, parameters, _ in results:
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        assert evaluation == pytest.approx(expected_evaluation, rel=1e-5)
        for key, tensor in expected.items():
            torch.testing.assert_close(parameters[key], tensor, rtol=1e-5, atol=1e-6, msg=f"{name}: {key}")
    assert {rows for *_, rows in results} - {None} == {SAMPLES}


def train_on_pairs(name, criterion):
    torch.manual_seed(2)
    model = TinyMLP()
    booster = Booster(plugin=plugin_named(name))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
    pairs = [(torch.full((2, 8), float(number)), torch.ones(2, 4)) for number in range(3)]
    batches = iter(pairs)
    losses = [booster.train_batch(batches, model, criterion, optimizer, accumulation=2) for _ in range(2)]
    assert next(batches, None) is None
    return losses, whole_model(booster, model)


def squared_error(outputs, batch):
    return torch.nn.functional.mse_loss(outputs, batch[1])


@pytest.mark.parametrize("name", ["single", "ddp"])
def test_pairs_of_inputs_and_targets_and_an_odd_last_batch(name):
    torch.manual_seed(2)
    model = TinyMLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    expected = []
    for numbers in ((0, 1), (2,)):
        each = [
            torch.nn.functional.mse_loss(model(torch.full((2, 8), float(number))), torch.ones(2, 4))
            for number in numbers
        ]
        loss = sum(each) / len(each)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.detach())
    for losses, parameters in run_on_ranks(train_on_pairs, 1 if name == "single" else 2, name, squared_error):
        torch.testing.assert_close(losses, expected)
        torch.testing.assert_close(parameters, {key: p.detach() for key, p in model.named_parameters()})


class Masked(TinyMLP):
    """A model with an optional argument."""

    def forward(self, x, mask=None):
        return super().forward(x if mask is None else x * mask)


def train_on_ambiguous_pairs():
    model = Masked()
    booster = Booster()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.train_batch(iter([(torch.ones(2, 8), torch.ones(2, 4))]), model, squared_error, optimizer)


def test_targets_that_could_be_an_argument_raise():
    with pytest.raises(ConfigError, match=r"requires 1: the others may be for `mask` or for the criterion"):
        train_on_ambiguous_pairs()


def train_without_loss():
    model = TinyMLP()
    booster = Booster()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.train_batch(iter([torch.ones(2, 8)]), model, None, optimizer)


def test_outputs_without_a_loss_raise():
    with pytest.raises(ConfigError, match=r"outputs \(`Tensor`\) have no loss. Pass a criterion"):
        train_without_loss()


def train_without_weight(name):
    model = make_model()
    booster = Booster(plugin=name)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = {**batches_of(0)[0], "labels": torch.full((SAMPLES, 6), -100)}
    booster.train_batch(iter([batch]), model, cross_entropy, optimizer, weight=count_labels)


def test_a_step_without_weight_raises_on_every_rank():
    expect_on_ranks(ConfigError, r"weights of the batches sum up to 0 over all ranks", train_without_weight, 2, "ddp")


@pytest.mark.parametrize("call", ["train_batch", "evaluate_batch"])
def test_a_loader_in_place_of_its_iterator_raises(call):
    model = TinyMLP()
    booster = Booster()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    arguments = [optimizer] if call == "train_batch" else []
    with pytest.raises(TypeError, match=rf"`Booster\.{call}` takes an iterator .*`iter\(dataloader\)`.*got `list`"):
        getattr(booster, call)([torch.ones(2, 8)], model, squared_error, *arguments)


@pytest.mark.parametrize("accumulation", [0, -1, True, 1.5])
def test_a_wrong_number_of_batches_raises(accumulation):
    model = TinyMLP()
    booster = Booster()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match=f"`accumulation={accumulation}` is no number of batches"):
        booster.train_batch(iter([torch.ones(2, 8)]), model, squared_error, optimizer, accumulation=accumulation)
