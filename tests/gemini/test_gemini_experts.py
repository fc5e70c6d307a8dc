"""Experts that the data chooses, differently on every rank: right with `leaf_modules`, an error without."""

import contextlib
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cases import Case, Setting, assert_equals_one_process, itself, train_boosted
from matrix import matrix
from ranked import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_core.ranks import observed_by
from booster_gemini import GeminiPlugin

WIDTH, EXPERTS = 16, 4


class Mixture(nn.Module):
    """Sends each row to the expert that its token names, weighed by a router; calls no others."""

    def __init__(self):
        super().__init__()
        self.router, self.shared = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x, tokens):
        weights = self.router(x).softmax(-1)
        out = self.shared(x)
        for number in (tokens % EXPERTS).unique().tolist():
            rows = (tokens % EXPERTS == number).nonzero().squeeze(1)
            out = out.index_add(0, rows, torch.tanh(self.experts[number](x[rows])) * weights[rows, number, None])
        return out, weights.square().mean()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.mixture = Mixture()

    def forward(self, x, tokens):
        hidden, term = self.mixture(torch.tanh(self.dense(x)), tokens)
        return x + hidden, term


class Net(nn.Module):
    """Layers with experts; the loss has a term of the routers of all layers, which backward begins with."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.table = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, tokens):
        x, routed = self.table(tokens), 0
        for layer in self.layers:
            if self.how == "plain" or not torch.is_grad_enabled():
                x, term = layer(x, tokens)
            else:
                x, term = checkpoint(layer, x, tokens, use_reentrant=self.how == "reentrant")
            routed = routed + term
        return self.head(x).square().mean() + routed


def tokens_of(step, rank):
    """Return tokens of one or two experts, of which ranks have different ones."""
    first = (step + 2 * rank) % EXPERTS
    chosen = torch.tensor([first, (first + 1) % EXPERTS if (step + rank) % 2 else first])
    return chosen.repeat(3) + EXPERTS * torch.arange(6)


CASE = Case(build=partial(Net, "plain"), batch=tokens_of, loss=itself, max_norm=None)


def pins_after_backward(booster, model, optimizer):
    booster.backward(model(tokens_of(0, dist.get_rank())), optimizer)
    assert len(model.gatherer.layout.buckets) > 6
    return sum(chunk.pins for chunk in model.gatherer.layout.buckets)


def assert_parity(how, num_ranks=2, **options):
    setting = Setting(GeminiPlugin, {"min_chunk_bytes": 1024, **options}, num_ranks)
    told = assert_equals_one_process(replace(CASE, build=partial(Net, how)), setting, tell=pins_after_backward)
    assert told == [0] * num_ranks


LEAVES = {
    "by class": [Mixture],
    "by name of a class": ["Mixture"],
    "lists by path": [f"layers.{number}.mixture.experts" for number in range(2)],
    "all layers": ["layers"],
}


@matrix(["lists by path-2"], **{"leaves, world_size": [*((name, 2) for name in LEAVES), ("by class", 3)]})
def test_gradients_of_chosen_experts_equal_one_process(leaves, world_size):
    assert_parity("plain", world_size, leaf_modules=LEAVES[leaves])


@matrix(["plain"], how=["plain", "checkpointed", "reentrant"])
def test_experts_may_be_recomputed_and_prefetched(how):
    assert_parity(how, leaf_modules=[Mixture], max_prefetch=3)


@on_ranks(2)
def test_ranks_that_use_other_experts_make_the_same_collectives():
    """A backend that runs them in order needs them to be equal."""
    seen, by_rank = [], [None, None]

    def during(call):
        if call.payload_bytes:
            seen.append((call.name, call.payload_bytes))
        return contextlib.nullcontext()

    with observed_by(SimpleNamespace(during=during)):
        train_boosted(CASE, Setting(GeminiPlugin, {"min_chunk_bytes": 1024, "leaf_modules": [Mixture]}))
    dist.all_gather_object(by_rank, seen)
    assert by_rank[0] == by_rank[1] != []


@on_ranks(2)
def test_a_leaf_that_is_not_there_raises_on_every_rank():
    match = r"`leaf_modules` lists 'Mixtures', and the model has no such module\..*classes: .*Mixture"
    with pytest.raises(ConfigError, match=match):
        Booster(plugin=GeminiPlugin(leaf_modules=["Mixtures"])).boost(Net("plain"))
    match = r"`leaf_modules` lists the class `Conv2d`, and the model has no such module"
    with pytest.raises(ConfigError, match=match):
        Booster(plugin=GeminiPlugin(leaf_modules=[nn.Conv2d])).boost(Net("plain"))


@pytest.mark.parametrize("leaves", ["Mixture", Mixture, [3], [int]])
def test_leaves_of_a_wrong_type_raise_at_once(leaves):
    with pytest.raises(TypeError, match="`leaf_modules"):
        GeminiPlugin(leaf_modules=leaves)
