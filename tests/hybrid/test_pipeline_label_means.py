"""A mean over labels that count is that of one process, however many of them each microbatch has; or it raises."""

from functools import partial

import pytest
import torch
from cases import Case, Setting, assert_equals_one_process, in_fp64, own_loss
from hybrid_runs import RING, stages
from matrix import matrix
from ranked import on_ranks
from torch import nn
from torch.nn import functional

from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_runtime import linear_cross_entropy, train_batch
from booster_testing.models import tiny_llama

SIZE, WORDS, SAMPLES = 8, 12, 6
LENGTHS = (2, 8, 7, 1, 5, 8)
"""Labels of each sample that count; four microbatches have 10, 8, 5 and 8."""


def text(side, number, replica):
    tokens = torch.randint(WORDS, (SAMPLES, SIZE), generator=torch.Generator().manual_seed(10 * number + replica))
    place = torch.arange(SIZE)
    lengths = torch.tensor(LENGTHS).unsqueeze(1)
    mask = place < lengths if side == "right" else place >= SIZE - lengths
    return {"input_ids": tokens, "attention_mask": mask.long(), "labels": tokens.masked_fill(~mask, -100)}


MESHES = {
    "pp": (2, {}),
    "tp2pp2": (4, {"tp_size": 2}),
    "ring2pp2": (4, RING),
}


@matrix(
    ["tp2pp2-1f1b-right", "pp-zbv-left", "ring2pp2-gpipe-left", "pp-interleaved-right"],
    mesh=MESHES,
    style=["1f1b", "gpipe", "interleaved", "zbv"],
    side=["left", "right"],
)
def test_the_loss_of_a_language_model_is_that_of_one_process(mesh, style, side):
    num_ranks, options = MESHES[mesh]
    options = {"pp_size": 2, "num_microbatches": 4, "pp_style": style, **options}
    llama = partial(tiny_llama, num_hidden_layers=4, vocab_size=WORDS)
    case = Case(build=partial(in_fp64, llama), batch=partial(text, side), loss=own_loss, steps=2)
    assert_equals_one_process(case, Setting(HybridParallelPlugin, options, num_ranks))


class Tagger(nn.Module):
    """Tags tokens; its loss is the script's."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(WORDS, SIZE), nn.Linear(SIZE, WORDS)
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(2))
        self.register_buffer("weight", torch.arange(1.0, WORDS + 1))
        self.double()

    def forward(self, input_ids, labels=None, mask=None):
        del labels, mask  # the criterion has them
        hidden = self.tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return self.head(hidden)


def entropy(outputs, batch):
    return nn.CrossEntropyLoss()(outputs.flatten(0, 1), batch["labels"].flatten())


def weighed(outputs, batch):
    weight = torch.arange(1.0, WORDS + 1, dtype=torch.float64)
    return functional.cross_entropy(outputs.transpose(1, 2), batch["labels"], weight, label_smoothing=0.1)


def other_index(outputs, batch):
    """Predict the next token; 0 is the padding."""
    labels = batch["input_ids"][:, 1:]
    return functional.nll_loss(outputs[:, :-1].log_softmax(-1).flatten(0, 1), labels.flatten(), ignore_index=0)


def two(outputs, batch):
    """Add a mean over all samples to one over labels that count."""
    return entropy(outputs, batch) + outputs.square().mean() + weighed(outputs, batch)


def by_chunks(outputs, batch):
    head = nn.Linear(WORDS, WORDS, bias=False, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(torch.eye(WORDS))
    return linear_cross_entropy(outputs, head, batch["labels"])


def tags(number, replica):
    batch = text("right", number, replica)
    del batch["attention_mask"]
    return batch


SETTING = stages(tags(0, 0), num_microbatches=4)


def without_labels(number, replica):
    return {"input_ids": tags(number, replica)["input_ids"]}


@pytest.mark.parametrize(
    ("criterion", "batch"),
    [(entropy, tags), (weighed, tags), (two, tags), (by_chunks, tags), (other_index, without_labels)],
)
def test_the_criterion_of_a_script_is_that_of_one_process(criterion, batch):
    assert_equals_one_process(Case(build=Tagger, batch=batch, loss=criterion, steps=2), SETTING)


def train(criterion, batch, weight=None):
    booster = SETTING.make_booster()
    torch.manual_seed(0)
    model = Tagger()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return train_batch(booster, iter([batch]), model, criterion, optimizer, weight=weight).item()


def assert_loss_of_one_process(criterion, batch, weight=None):
    torch.manual_seed(0)
    expected = criterion(Tagger()(batch["input_ids"]), batch).item()
    assert train(criterion, batch, weight) == pytest.approx(expected)


@on_ranks(2)
def test_labels_that_are_made_in_the_criterion_raise_or_are_weighed():
    def masked_inside(outputs, batch):
        labels = batch["labels"].masked_fill(batch["input_ids"] < 3, -100)
        return functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())

    def counted(batch):
        return ((batch["labels"] != -100) & (batch["input_ids"] >= 3)).sum()

    with pytest.raises(ConfigError, match=r"mean over labels that count.*`weight=`"):
        train(masked_inside, tags(0, 0))
    assert_loss_of_one_process(masked_inside, tags(0, 0), counted)


@on_ranks(2)
def test_vectors_that_the_criterion_alone_takes_are_cut_into_microbatches():
    def of_vectors(outputs, batch):
        return ((outputs.mean((1, 2)) - batch["targets"]).square() * batch["weights"]).mean()

    weights = torch.linspace(1.0, 2.0, SAMPLES).double()
    assert_loss_of_one_process(of_vectors, {**without_labels(0, 0), "targets": weights.square(), "weights": weights})


@on_ranks(2)
def test_labels_of_equal_numbers_may_be_made_of_anything():
    """Label by position, alike in all samples: microbatches have equal shares, whatever the labels are made of."""

    def alike(outputs, _batch):
        labels = torch.arange(SIZE).expand(outputs.shape[:2])
        return functional.cross_entropy(outputs.flatten(0, 1), labels.masked_fill(labels < 2, -100).flatten())

    assert_equals_one_process(Case(build=Tagger, batch=tags, loss=alike, steps=1), SETTING)


def masks(lengths, number, replica):
    batch = without_labels(number, replica)
    return {**batch, "mask": (torch.arange(SIZE) < torch.tensor(lengths).unsqueeze(1)).double()}


def losses_of(outputs):
    return outputs.square().mean(-1)


def divided(outputs, batch):
    return (losses_of(outputs) * batch["mask"]).sum() / batch["mask"].sum().clamp(min=1)


def divided_by_a_number(outputs, batch):
    return (losses_of(outputs) * batch["mask"]).sum() / batch["mask"].sum().item()


def weighed_by_position(outputs, batch):
    return (losses_of(outputs) * (batch["mask"] / batch["mask"].sum())).sum()


def selected(outputs, batch):
    return losses_of(outputs)[batch["mask"] > 0].mean()


def selected_by_loss(outputs, batch):
    chosen = outputs[batch["mask"] > 0]
    return functional.mse_loss(chosen, torch.zeros_like(chosen))


MASKED = (divided, divided_by_a_number, weighed_by_position, selected, selected_by_loss)
"""Means over a mask, as trainers with rewards take them over answers (`masked_mean` of several libraries)."""


@pytest.mark.parametrize("criterion", MASKED)
@on_ranks(2)
def test_a_mean_over_a_mask_of_other_lengths_raises_or_is_weighed(criterion):
    batch = masks(LENGTHS, 0, 0)
    with pytest.raises(ConfigError, match=r"`mask\.sum\(\)`.*`weight=`"):
        train(criterion, batch)
    assert_loss_of_one_process(criterion, batch, lambda batch: batch["mask"].sum())


@pytest.mark.parametrize("criterion", MASKED)
def test_a_mean_over_a_mask_of_equal_lengths_is_that_of_one_process(criterion):
    case = Case(build=Tagger, batch=partial(masks, (2, 8, 5, 5, 4, 6)), loss=criterion, steps=2)
    assert_equals_one_process(case, stages(tags(0, 0), num_microbatches=3))


@on_ranks(2)
def test_means_over_each_samples_mask_are_those_of_one_process():
    """Take the mean over each sample's mask, weigh samples, and add a mean over all of them."""

    def by_sample(outputs, batch):
        own = (losses_of(outputs) * batch["mask"]).sum(1) / batch["mask"].sum(1)
        return (own * batch["mask"].mean(1)).mean() + batch["mask"].mean() - outputs[..., 0].mean()

    assert_equals_one_process(Case(build=Tagger, batch=partial(masks, LENGTHS), loss=by_sample, steps=2), SETTING)
