"""Plain PyTorch models, whose layers attend by torch's function, with split sequences: as one process, or refused."""

from __future__ import annotations

import pytest
import torch
from matrix import matrix
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_hybrid.policy.base import ShardingPolicy
from booster_runtime import enable_activation_checkpointing, full_gradient
from booster_testing import expect_on_ranks, run_on_ranks

HIDDEN, HEADS = 16, 4


def rotated(states, angles):
    first, second = states.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Layer(nn.Module):
    """Attention and a feed-forward part; what it does with positions is its kind."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.norm, self.qkv = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN)
        self.out, self.mlp = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(0.0)

    def attend(self, hidden, angles):
        batch, length, _ = hidden.shape
        parts = self.qkv(self.norm(hidden)).view(batch, length, 2 * HEADS, -1).transpose(1, 2)
        query, key, value = parts.split([HEADS, HEADS // 2, HEADS // 2], 1)
        if self.kind == "makes positions":
            angles = torch.arange(length)[:, None] * 0.5
        if self.kind != "takes none":
            query, key = rotated(query, angles.to(query)), rotated(key, angles.to(query))
        if self.kind == "multiplies":
            scores = (query @ key.repeat_interleave(2, 1).transpose(-1, -2)).softmax(-1)
            found = scores @ value.repeat_interleave(2, 1)
        else:
            found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return found.transpose(1, 2).flatten(2)

    def forward(self, hidden, angles=None):
        if self.kind == "checkpoints a function":
            found = checkpoint(self.attend, hidden, angles, use_reentrant=False)
        else:
            found = self.attend(hidden, angles)
        hidden = hidden + self.dropout(self.out(found))
        if self.kind == "sums positions":
            hidden = hidden.cumsum(1)
        return hidden + nn.functional.gelu(self.mlp(hidden))


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(32, HIDDEN), nn.Embedding(64, HIDDEN)
        self.blocks = nn.ModuleList(Layer(kind) for _ in range(2))
        self.head = nn.Linear(HIDDEN, 32)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1])
        hidden = self.embedding(tokens) + self.positions(positions)
        angles = positions[:, None] / torch.tensor([1.0, 7.0])[: HIDDEN // 2 // HEADS][None]
        for block in self.blocks:
            hidden = block(hidden, angles)
        return self.head(hidden)


def make(kind):
    torch.manual_seed(0)
    return Model(kind)


def boosted(kind, mode, before=None):
    model = make(kind)
    if before is not None:
        before(model)
    plugin = HybridParallelPlugin(
        sp_size=2,
        sequence_parallelism_mode=mode,
        custom_policy=ShardingPolicy(layers=("blocks",)),
        example_batch=torch.arange(60).view(3, 20) % 32,
    )
    booster = Booster("cpu", plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return booster, model, optimizer


def loss_of(model, tokens):
    logits = model(tokens)[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def compare(kind, mode, checkpointed):
    booster, model, optimizer = boosted(kind, mode)
    if checkpointed:
        enable_activation_checkpointing(model, Layer)
    expected = make(kind)
    generator = torch.Generator().manual_seed(1)
    for length in (11, 16, 2):
        tokens = torch.randint(32, (3, length), generator=generator)
        truth, found = loss_of(expected, tokens), loss_of(model, tokens)
        truth.backward()
        booster.backward(found, optimizer)
        torch.testing.assert_close(found.detach(), truth.detach())
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(full_gradient(booster, model, name), parameter.grad, rtol=1e-4, atol=1e-6)
        expected.zero_grad()
        optimizer.zero_grad()


def compare_kinds(mode):
    for kind in ("takes none", "takes angles"):
        for checkpointed in (False, True):
            compare(kind, mode, checkpointed)


@matrix(["ring_attn"], mode=["all_to_all", "ring_attn"])
def test_layers_that_call_torch_attention_train_as_on_one_process(mode):
    run_on_ranks(compare_kinds, 2, mode)


def run_once(kind):
    _, model, _ = boosted(kind, "ring_attn")
    model(torch.zeros(3, 16, dtype=torch.long))


@pytest.mark.parametrize("kind", ["makes positions", "sums positions", "checkpoints a function", "multiplies"])
def test_layers_that_differ_on_parts_of_a_sequence_are_refused(kind):
    message = "(changes what Model computes|'Layer' of Model does not call its attention)"
    expect_on_ranks(ConfigError, message, run_once, 2, kind)


def checkpoint_first():
    boosted("takes none", "ring_attn", before=lambda model: enable_activation_checkpointing(model, Layer))


def test_checkpointing_before_boost_is_refused():
    expect_on_ranks(ConfigError, "Enable it after `boost`|enable it after `boost`", checkpoint_first, 2)


def run_square():
    _, model, _ = boosted("takes angles", "ring_attn")
    model(torch.zeros(16, 16, dtype=torch.long))


def test_as_many_samples_as_positions_are_refused():
    expect_on_ranks(ConfigError, "16 samples of 16 positions", run_square, 2)
