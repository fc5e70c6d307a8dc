"""Layers that look at how many positions there are: as one process for every length, or refused before they run."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from matrix import matrix
from torch import nn
from torch.utils.data import DataLoader
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_hybrid.policy.base import ShardingPolicy
from booster_hybrid.probe.sequences import check_sequences
from booster_testing import run_on_ranks
from booster_testing.models import tiny_llama

HIDDEN, HEADS, LIMIT, LONG = 16, 4, 200, 301


def beyond(positions):
    return 0.1 * (positions - LIMIT).clamp(min=0)[:, None]


def branch(hidden, _):
    return hidden * 1.5 if hidden.shape[1] > LIMIT else hidden


def rotations(hidden, _):
    return hidden * max(1.0, hidden.size(1) / LIMIT)


def blocks(hidden, _):
    return hidden * (1 + hidden.shape[-2] // LIMIT)


def rounded(hidden, _):
    return hidden * (1 + int(hidden.shape[1] / LIMIT))


def logarithm(hidden, _):
    return hidden * max(1.0, math.log(hidden.shape[1]) / math.log(LIMIT))


def of_numpy(hidden, _):
    return hidden * float(np.maximum(1.0, np.log2(hidden.shape[1]) / np.log2(LIMIT)))


def remainder(hidden, _):
    return hidden * 1.5 if hidden.numel() % (3 * HIDDEN * LONG) == 0 else hidden


def beginning(hidden, _):
    return torch.cat([hidden[:, :LIMIT] * 1.5, hidden[:, LIMIT:]], 1)


def token_shift(hidden, _):
    return hidden + 0.5 * nn.functional.pad(hidden, (0, 0, LIMIT, 0))[:, : hidden.shape[1]]


def windows(hidden, _):
    return torch.cat([each * (1.0 + index) for index, each in enumerate(hidden.split(LIMIT, 1))], 1)


def slopes(hidden, _):
    return hidden + beyond(torch.arange(hidden.shape[1]))


def counted(hidden, _):
    return hidden + beyond(torch.ones_like(hidden[0, :, 0]).cumsum(0))


def table(hidden, layer):
    return hidden + layer.table[: hidden.shape[1]]


def last_position(hidden, layer):
    return hidden * 1.5 if layer.positions.max() > LIMIT else hidden


KINDS = (
    *(branch, slopes, rotations, blocks, rounded, remainder, beginning, token_shift, windows),
    *(counted, table, last_position, logarithm, of_numpy),
)


class Layer(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = change
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("table", beyond(torch.arange(2 * LONG)))
        self.positions = None

    def forward(self, hidden, positions):
        self.positions = positions
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
            hidden = block(hidden, torch.arange(tokens.shape[1])[None])
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


def message_of(call, *args, **kwargs):
    """Return what a call says that is refused."""
    try:
        call(*args, **kwargs)
    except ConfigError as error:
        return str(error)
    return "nothing"


def later(mode, kinds):
    found = {}
    for change in kinds:
        model, whole = boosted(make(change), mode), make(change)
        with torch.no_grad():
            short = tokens_of(40)
            torch.testing.assert_close(model(short), whole(short))
            found[change.__name__] = message_of(model, tokens_of(LONG))
    return found


@pytest.mark.parametrize(("mode", "kinds"), [("all_to_all", KINDS[:1]), ("ring_attn", KINDS[1:])])
def test_what_layers_do_beyond_the_positions_of_a_probe_is_refused_before_they_run(mode, kinds):
    for found in run_on_ranks(later, 2, mode, kinds):
        assert found.keys() == {each.__name__ for each in kinds}
        for name, message in found.items():
            assert "a 'Layer' " in message, name
            assert "example_batch" in message, name


def at_boost():
    for change in (branch, table, last_position):
        with pytest.raises(ConfigError, match="changes what Model computes"):
            boosted(make(change), "all_to_all", example_batch=tokens_of(LONG))


def test_an_example_as_long_as_batches_are_shows_it_at_boost():
    run_on_ranks(at_boost, 2)


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


def as_one_process(mode):
    for change in (far_away, numbered, plain):
        model, whole = boosted(make(change), mode), make(change)
        for length in (2, 60, LONG):
            torch.testing.assert_close(model(tokens_of(length)), whole(tokens_of(length)))
    model, whole = boosted(make(unused), mode, example_batch=tokens_of(LONG)), make(unused)
    for length in (60, LONG):
        torch.testing.assert_close(model(tokens_of(length)), whole(tokens_of(length)))


@matrix(["all_to_all"], mode=["all_to_all", "ring_attn"])
def test_layers_that_do_the_same_at_every_length_run_at_every_length(mode):
    run_on_ranks(as_one_process, 2, mode)


class Scaled(LlamaDecoderLayer):
    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(branch(hidden_states, None), *args, **kwargs)


class Sloped(LlamaDecoderLayer):
    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(slopes(hidden_states, None), *args, **kwargs)


def of_transformers(mode, options):
    """Layers that ask are refused where sequences are long, and others are not."""
    kinds = {Scaled: "a 'Scaled' asks whether positions > 200", Sloped: "a 'Sloped' counts positions by `arange`"}
    for kind in (LlamaDecoderLayer, *kinds):
        model = tiny_llama(num_hidden_layers=2, max_position_embeddings=2 * LONG)
        model.model.layers[1].__class__ = kind
        model = boosted(model, mode, **options)
        message = message_of(model, tokens_of(LONG))
        assert kinds.get(kind, "nothing") in message, message


@pytest.mark.parametrize(
    ("mode", "options"),
    [("all_to_all", {"sp_size": 2}), pytest.param("split_gather", {"tp_size": 2}, marks=pytest.mark.slow)],
)
def test_layers_of_transformers_are_watched_too(mode, options):
    run_on_ranks(of_transformers, 2, mode, options)


class OfWhole(LlamaMLP):
    def forward(self, x):
        return super().forward(slopes(branch(x, None), None))


def whole_blocks():
    model, whole = (tiny_llama(num_hidden_layers=2, max_position_embeddings=2 * LONG) for _ in range(2))
    whole.load_state_dict(model.state_dict())
    for layer in (*model.model.layers, *whole.model.layers):
        layer.mlp.__class__ = OfWhole
    model = boosted(model, "split_gather", tp_size=2, parallel_output=False)
    found, expected = model(tokens_of(LONG)).logits, whole(tokens_of(LONG)).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_blocks_that_get_whole_sequences_may_ask_for_their_length():
    run_on_ranks(whole_blocks, 2)


@pytest.mark.parametrize(("sizes", "text"), [((8, 1), "4 heads are no multiple of 8"), ((2, 4), "1 heads are no mul")])
def test_heads_are_counted_where_layers_attend(sizes, text):
    with pytest.raises(ConfigError, match=text):
        check_sequences(make(plain), ["blocks"], "all_to_all", sizes, torch.device("cpu"), [tokens_of(40)])
