"""Layers that look at how many positions there are: as one process, or refused at `boost` by an example as long."""

from __future__ import annotations

import pytest
import torch
from matrix import matrix
from ranked import on_ranks
from torch import nn
from torch.utils.data import DataLoader
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_hybrid.policy.base import ShardingPolicy
from booster_hybrid.probe.sequences import check_sequences
from booster_testing.models import tiny_llama

HIDDEN, HEADS, LIMIT, LONG = 16, 4, 200, 301


def beyond(positions):
    return 0.1 * (positions - LIMIT).clamp(min=0)[:, None]


def branch(hidden, _):
    return hidden * 1.5 if hidden.shape[1] > LIMIT else hidden


def slopes(hidden, _):
    return hidden + beyond(torch.arange(hidden.shape[1]))


def table(hidden, layer):
    return hidden + layer.table[: hidden.shape[1]]


class Layer(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = change
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("table", beyond(torch.arange(2 * LONG)))

    def forward(self, hidden):
        hidden = self.change(hidden, self)
        batch, length, _ = hidden.shape
        query, key, value = self.qkv(hidden).view(batch, length, 3 * HEADS, -1).transpose(1, 2).chunk(3, 1)
        found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return hidden + self.out(found.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.table = nn.Embedding(32, HIDDEN)
        self.blocks = nn.ModuleList(Layer(change) for _ in range(2))

    def forward(self, tokens):
        hidden = self.table(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def make(change):
    torch.manual_seed(0)
    return Model(change)


def boosted(model, mode, **options):
    policy = ShardingPolicy(layers=("blocks",)) if isinstance(model, Model) else None
    sizes = {} if "tp_size" in options else {"sp_size": 2}
    plugin = HybridParallelPlugin(**{"sequence_parallelism_mode": mode, "custom_policy": policy} | sizes | options)
    loader = DataLoader([torch.arange(40) % 32 for _ in range(4)], batch_size=4) if isinstance(model, Model) else None
    return Booster("cpu", plugin=plugin).boost(model, None, dataloader=loader)[0]


def tokens_of(length):
    return torch.arange(3 * length).view(3, length) % 32


@on_ranks(2)
def test_an_example_as_long_as_batches_are_shows_it_at_boost():
    for change in (branch, table, slopes):
        with pytest.raises(ConfigError, match="changes what Model computes"):
            boosted(make(change), "all_to_all", example_batch=tokens_of(LONG))


def far_away(hidden, _):
    return hidden * 2 if hidden.shape[1] > 100 * LONG else hidden


def numbered(hidden, _):
    order = torch.arange(hidden.shape[0] * hidden.shape[1])  # of tokens, as experts are given them
    return hidden.flatten(0, 1)[order].view_as(hidden)


def unused(hidden, _):
    return hidden + 0 * torch.arange(hidden.shape[1])[:, None]


def plain(hidden, _):
    filler = torch.zeros(hidden.shape[:2])
    return (hidden + filler[..., None]).reshape(hidden.shape[0], -1, 2, HIDDEN // 2).flatten(-2)


@matrix(["all_to_all"], mode=["all_to_all", "ring_attn"])
@on_ranks(2)
def test_layers_that_do_the_same_at_every_length_run_at_every_length(mode):
    for change in (far_away, numbered, plain):
        model, whole = boosted(make(change), mode), make(change)
        for length in (2, 60, LONG):
            torch.testing.assert_close(model(tokens_of(length)), whole(tokens_of(length)))
    model, whole = boosted(make(unused), mode, example_batch=tokens_of(LONG)), make(unused)
    for length in (60, LONG):
        torch.testing.assert_close(model(tokens_of(length)), whole(tokens_of(length)))


class Scaled(LlamaDecoderLayer):
    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(branch(hidden_states, None), *args, **kwargs)


class Sloped(LlamaDecoderLayer):
    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(slopes(hidden_states, None), *args, **kwargs)


@on_ranks(2)
def test_between_blocks_as_well():
    for kind in (Scaled, Sloped):
        model = tiny_llama(num_hidden_layers=2, max_position_embeddings=2 * LONG)
        model.model.layers[1].__class__ = kind
        with pytest.raises(ConfigError, match="changes what"):
            boosted(model, "split_gather", tp_size=2, example_batch=tokens_of(LONG))


class OfWhole(LlamaMLP):
    def forward(self, x):
        return super().forward(slopes(branch(x, None), None))


@on_ranks(2)
def test_blocks_that_get_whole_sequences_may_ask_for_their_length():
    model, whole = (tiny_llama(num_hidden_layers=2, max_position_embeddings=2 * LONG) for _ in range(2))
    whole.load_state_dict(model.state_dict())
    for layer in (*model.model.layers, *whole.model.layers):
        layer.mlp.__class__ = OfWhole
    model = boosted(model, "split_gather", tp_size=2, parallel_output=False)
    found, expected = model(tokens_of(LONG)).logits, whole(tokens_of(LONG)).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("sizes", "text"), [((8, 1), "4 heads are no multiple of 8"), ((2, 4), "1 heads are no mul")])
def test_heads_are_counted_where_layers_attend(sizes, text):
    with pytest.raises(ConfigError, match=text):
        check_sequences(make(plain), ["blocks"], "all_to_all", sizes, torch.device("cpu"), [tokens_of(40)])
