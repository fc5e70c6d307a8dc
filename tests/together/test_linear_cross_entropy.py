"""The loss over chunks of logits under every plugin: losses and gradients of one process with whole logits."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import Case, Setting, assert_same_training, itself, train_boosted, train_plainly
from matrix import matrix
from plugin_runs import RUNS, runs
from ranked import raises_on_ranks
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_fsdp import TorchFSDPPlugin
from booster_hybrid import HybridParallelPlugin, ModuleRule, ShardingPolicy, Style
from booster_runtime import (
    enable_linear_cross_entropy,
    linear_cross_entropy,
    train_batch,
)
from booster_testing import run_on_ranks
from booster_testing.compare import tolerance_for
from booster_testing.models import tiny_llama

VOCABULARY = 2053  # large enough for a unit of its own under FSDP, and split unevenly
SETTINGS = {
    **runs("single", "ddp", "fsdp", "zero1", "zero2", "gemini", "hybrid-tp"),
    "fsdp-layers": Setting(TorchFSDPPlugin, {"unit_min_numel": 1 << 30}),
    "hybrid-whole": Setting(HybridParallelPlugin, {"tp_size": 2, "parallel_output": False}),
    "hybrid-zero3": RUNS["zero3"],
    "hybrid-tp-zero3": Setting(HybridParallelPlugin, {"tp_size": 2, "zero_stage": 3}, 4),
}


def make_llama(*, tied, by_chunks=False):
    model = tiny_llama(vocab_size=VOCABULARY, tie_word_embeddings=tied).train()
    if by_chunks:
        enable_linear_cross_entropy(model)
    return model


def batch_of(name, number, replica):
    """Return samples of a replica; all replicas have equally many labels that count."""
    tokens = torch.randint(VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(10 * number + replica))
    labels = tokens.clone()
    labels[:, 2] = -100
    return {name: tokens, "labels": labels}


def llama(*, tied, by_chunks, **changes):
    build = partial(make_llama, tied=tied, by_chunks=by_chunks)
    return Case(build=build, batch=partial(batch_of, "input_ids"), steps=2, **changes)


@matrix(["ddp-bf16", "fsdp-fp16", "gemini-bf16", "hybrid-tp-fp16"], run=SETTINGS, precision=["bf16", "fp16"])
def test_narrow_runs_differ_by_rounding_alone(run, precision):
    setting = replace(SETTINGS[run], options={**SETTINGS[run].options, "precision": precision})
    by_chunks, whole = (
        llama(tied=False, by_chunks=by_chunks, tolerance=tolerance_for(torch.bfloat16)) for by_chunks in (True, False)
    )
    expected = run_on_ranks(train_boosted, setting.num_ranks, whole, setting)
    found = run_on_ranks(train_boosted, setting.num_ranks, by_chunks, setting)
    for actual, other in zip(found, expected, strict=True):
        assert_same_training(actual.trained, other.trained, whole)


def assert_trains_as(case, whole, setting):
    """Assert that a case trains as another does in one process."""
    for actual in run_on_ranks(train_boosted, setting.num_ranks, case, setting):
        assert_same_training(actual.trained, train_plainly(whole, actual.num_replicas), whole)


@matrix(
    [
        "ddp-True",
        "fsdp-False",
        "fsdp-layers-True",
        "zero2-True",
        "gemini-False",
        "hybrid-tp-True",
        "hybrid-whole-False",
    ],
    run=SETTINGS,
    tied=[False, True],
)
def test_a_llama_trains_as_with_whole_logits(run, tied):
    assert_trains_as(llama(tied=tied, by_chunks=True), llama(tied=tied, by_chunks=False), SETTINGS[run])


class Plain(nn.Module):
    """Embeds, and returns the loss, or the hidden states and the head for a criterion that calls it."""

    def __init__(self, loss):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.body = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.head = nn.Linear(32, VOCABULARY)
        self.loss = loss

    def forward(self, tokens, labels):
        hidden = self.embed(tokens)
        for layer in self.body:
            hidden = hidden + layer(hidden).tanh()
        if self.loss == "of criterion":
            return hidden, self.head
        if self.loss == "by chunks":
            return by_chunks((hidden, self.head), {"labels": labels})
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def by_chunks(outputs, batch):
    return linear_cross_entropy(*outputs, batch["labels"])


def plain(loss):
    criterion = by_chunks if loss == "of criterion" else itself
    return Case(build=partial(Plain, loss), batch=partial(batch_of, "tokens"), loss=criterion, steps=3)


def with_policy(run):
    split = {"custom_policy": HEAD_ALONE} if "tp_size" in SETTINGS[run].options else {}
    return replace(SETTINGS[run], options={**SETTINGS[run].options, **split})


HEAD_ALONE = ShardingPolicy(rules=(ModuleRule("head", Style.HEAD),))


@matrix(["ddp", "fsdp-layers", "zero2", "hybrid-tp-zero3"], run=SETTINGS)
def test_a_plain_model_trains_as_with_whole_logits(run):
    assert_trains_as(plain("by chunks"), plain("whole"), with_policy(run))


@matrix(1, run=SETTINGS)
def test_a_criterion_may_call_the_head(run):
    assert_trains_as(plain("of criterion"), plain("whole"), with_policy(run))


@pytest.mark.parametrize("options", [{"pp_size": 2}, {"sp_size": 2, "sequence_parallelism_mode": "all_to_all"}])
@raises_on_ranks(ConfigError, "enable_linear_cross_entropy|pp_size", 2)
def test_split_positions_and_stages_are_refused(options):
    model = make_llama(tied=False)
    enable_linear_cross_entropy(model)
    booster = Booster("cpu", plugin=HybridParallelPlugin(**options))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens = torch.randint(VOCABULARY, (4, 8))
    train_batch(booster, iter([{"input_ids": tokens, "labels": tokens}]), model, None, optimizer)
