"""The loss over chunks of logits under every plugin: losses and gradients of one process with whole logits."""

import functools

import pytest
import torch
from matrix import matrix
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError, GradientError
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin, ModuleRule, ShardingPolicy, Style
from booster_runtime import (
    enable_linear_cross_entropy,
    full_gradient,
    linear_cross_entropy,
    train_batch,
)
from booster_runtime.single import SingleDeviceStrategy
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.models import tiny_llama
from booster_tools.planning import Candidate, Devices, plan
from booster_zero import LowLevelZeroPlugin

VOCABULARY = 2053  # large enough for a unit of its own under FSDP, and split unevenly
RUNS = {
    "single": (SingleDeviceStrategy, {}, 1),
    "ddp": (TorchDDPPlugin, {}, 2),
    "fsdp": (TorchFSDPPlugin, {}, 2),
    "fsdp-layers": (TorchFSDPPlugin, {"unit_min_numel": 1 << 30}, 2),
    "zero1": (LowLevelZeroPlugin, {"stage": 1}, 2),
    "zero2": (LowLevelZeroPlugin, {"stage": 2, "bucket_bytes": 256}, 2),
    "gemini": (GeminiPlugin, {}, 2),
    "hybrid-tp": (HybridParallelPlugin, {"tp_size": 2}, 2),
    "hybrid-whole": (HybridParallelPlugin, {"tp_size": 2, "parallel_output": False}, 2),
    "hybrid-zero3": (HybridParallelPlugin, {"zero_stage": 3}, 2),
    "hybrid-tp-zero3": (HybridParallelPlugin, {"tp_size": 2, "zero_stage": 3}, 4),
}


def make_llama(*, tied):
    torch.manual_seed(4)
    return tiny_llama(vocab_size=VOCABULARY, tie_word_embeddings=tied).train()


def narrow_llama(plugin_class, options, precision, prepare):
    return train(plugin_class, {**options, "precision": precision}, make_llama(tied=False), own_loss, prepare)


@matrix(["ddp-bf16", "fsdp-fp16", "gemini-bf16", "hybrid-tp-fp16"], run=RUNS, precision=["bf16", "fp16"])
def test_narrow_runs_differ_by_rounding_alone(run, precision):
    plugin_class, options, world_size = RUNS[run]
    expected = run_on_ranks(narrow_llama, world_size, plugin_class, options, precision, None)
    found = run_on_ranks(narrow_llama, world_size, plugin_class, options, precision, enable_linear_cross_entropy)
    for actual, other in zip(found, expected, strict=True):
        assert_same_tensors(actual, other, tolerance_for(torch.bfloat16))


class Plain(nn.Module):
    """Embeds, and returns hidden states, or the loss itself where it gets labels."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.body = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens, labels=None, *, by_chunks=True):
        hidden = self.embed(tokens)
        for layer in self.body:
            hidden = hidden + layer(hidden).tanh()
        if labels is None:
            return hidden
        if by_chunks:
            return linear_cross_entropy(hidden, self.head, labels, label_smoothing=0.1)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def batch_of(booster, step):
    """Return this rank's samples; all ranks have equally many labels that count."""
    tokens = torch.randint(VOCABULARY, (4, 7), generator=torch.Generator().manual_seed(step))
    labels = tokens.clone()
    labels[:, 2] = -100
    rank, size = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    return tokens[rank::size], labels[rank::size]


def train(plugin_class, options, model, loss_of, prepare=None):
    """Return losses and gradients of two steps."""
    names = [name for name, _ in model.named_parameters()]
    if prepare is not None:
        prepare(model)
    booster = Booster("cpu", plugin=plugin_class(**options))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    results = {}
    for step in range(2):
        loss = loss_of(booster, model, optimizer, *batch_of(booster, step))
        gathered = [torch.zeros(()) for _ in range(booster.context.coordinator.world_size)]
        torch.distributed.all_gather(gathered, loss.detach().float()) if len(gathered) > 1 else None
        results[f"{step} loss"] = torch.stack(gathered).mean() if len(gathered) > 1 else loss.detach()
        results |= {f"{step} {name}": full_gradient(booster, model, name) for name in names}
        optimizer.step()
        optimizer.zero_grad()
    return results


def own_loss(booster, model, optimizer, tokens, labels):
    outputs = model(input_ids=tokens, labels=labels)
    booster.backward(outputs.loss, optimizer)
    return outputs.loss


def llama(plugin_class, options, tied, prepare):
    return train(plugin_class, options, make_llama(tied=tied), own_loss, prepare)


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
    run=RUNS,
    tied=[False, True],
)
def test_a_llama_trains_as_with_whole_logits(run, tied):
    plugin_class, options, world_size = RUNS[run]
    expected = llama(SingleDeviceStrategy, {}, tied, None)
    for actual in run_on_ranks(llama, world_size, plugin_class, options, tied, enable_linear_cross_entropy):
        assert_same_tensors(actual, expected, tolerance_for(torch.float32))


def in_forward(booster, model, optimizer, tokens, labels, by_chunks=True):
    loss = model(tokens, labels, by_chunks=by_chunks)
    booster.backward(loss, optimizer)
    return loss


def whole(*args):
    return in_forward(*args, by_chunks=False)


def in_criterion(booster, model, optimizer, tokens, labels):
    loss = linear_cross_entropy(model(tokens), model.unwrap().head, labels, label_smoothing=0.1)
    booster.backward(loss, optimizer)
    return loss


def plain(plugin_class, options, loss_of):
    torch.manual_seed(1)
    if "tp_size" in options:
        options = {**options, "custom_policy": HEAD_ALONE}
    return train(plugin_class, options, Plain(), loss_of)


HEAD_ALONE = ShardingPolicy(rules=(ModuleRule("head", Style.HEAD),))
OUTSIDE = {
    "ddp": (GradientError, "no_sync"),
    "fsdp": (ConfigError, "forward_methods"),
    "fsdp-layers": (ConfigError, "forward_methods"),
}


@matrix(["ddp", "fsdp-layers", "zero2", "hybrid-tp-zero3"], run=RUNS)
def test_a_plain_model_trains_as_with_whole_logits(run):
    plugin_class, options, world_size = RUNS[run]
    expected = plain(SingleDeviceStrategy, {}, whole)
    for actual in run_on_ranks(plain, world_size, plugin_class, options, in_forward):
        assert_same_tensors(actual, expected, tolerance_for(torch.float32))


@matrix(1, run=RUNS)
def test_a_criterion_may_call_the_head_or_is_refused(run):
    plugin_class, options, world_size = RUNS[run]
    if run in OUTSIDE:
        expect_on_ranks(*OUTSIDE[run], plain, world_size, plugin_class, options, in_criterion)
        return
    expected = plain(SingleDeviceStrategy, {}, whole)
    for actual in run_on_ranks(plain, world_size, plugin_class, options, in_criterion):
        assert_same_tensors(actual, expected, tolerance_for(torch.float32))


@pytest.mark.parametrize("options", [{"pp_size": 2}, {"sp_size": 2, "sequence_parallelism_mode": "all_to_all"}])
def test_split_positions_and_stages_are_refused(options):
    expect_on_ranks(ConfigError, "enable_linear_cross_entropy|pp_size", stages, 2, options)


def stages(options):
    model = make_llama(tied=False)
    enable_linear_cross_entropy(model)
    booster = Booster("cpu", plugin=HybridParallelPlugin(**options))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens = torch.randint(VOCABULARY, (4, 8))
    train_batch(booster, iter([{"input_ids": tokens, "labels": tokens}]), model, None, optimizer)


def test_plans_show_what_it_saves():
    def build(prepare):
        model = make_llama(tied=False)
        if prepare is not None:
            prepare(model)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def batch():
        tokens = torch.zeros(8, 32, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}

    devices = Devices(number=2, memory_bytes=1 << 30)
    plans = [
        plan(functools.partial(build, prepare), batch, devices, settings=[Candidate(name="ddp")])
        for prepare in (enable_linear_cross_entropy, None)
    ]
    by_chunks, whole = (one.settings[0].prediction.peak_bytes for one in plans)
    assert by_chunks < 0.7 * whole
