"""What an example shows of split sequences is refused at `boost`; layers may look at how many positions there are."""

import pytest
import torch
import torch.distributed as dist
from matrix import matrix
from ranked import on_ranks
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_hybrid.policy.base import ShardingPolicy
from booster_hybrid.probe.sequences import check_sequences
from booster_runtime import LazyInitContext
from booster_testing.models import tiny_llama

HIDDEN, HEADS, LIMIT, LONG = 16, 4, 200, 301
MODES = ("all_to_all", "ring_attn")


def beyond(positions):
    return 0.1 * (positions - LIMIT).clamp(min=0)[:, None]


def branch(hidden, _):
    return hidden * 1.5 if hidden.shape[1] > LIMIT else hidden


def slopes(hidden, _):
    return hidden + beyond(torch.arange(hidden.shape[1]))


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
        return hidden + self.out(self.attend(query, key, value).transpose(1, 2).flatten(2))

    def attend(self, query, key, value):
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class Model(nn.Module):
    def __init__(self, change, layer=Layer, num_layers=2):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(32, HIDDEN)
        self.blocks = nn.ModuleList(layer(change) for _ in range(num_layers))

    def embed(self, tokens):
        return self.table(tokens)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def loader_of(length, samples=4):
    return DataLoader([torch.arange(row, row + length) % 32 for row in range(samples)], batch_size=samples)


def boosted(model, mode, loader=None, **options):
    policy = ShardingPolicy(layers=("blocks",)) if isinstance(model, Model) else None
    sizes = {} if "tp_size" in options else {"sp_size": 2}
    plugin = HybridParallelPlugin(**{"sequence_parallelism_mode": mode, "custom_policy": policy} | sizes | options)
    return Booster("cpu", plugin=plugin).boost(model, None, dataloader=loader)[0]


def tokens_of(length):
    return torch.arange(3 * length).view(3, length) % 32


@on_ranks(2)
def test_an_example_as_long_as_batches_are_shows_it_at_boost():
    for change in (branch, lambda hidden, layer: hidden + layer.table[: hidden.shape[1]], slopes):
        with pytest.raises(ConfigError, match="changes what Model computes"):
            boosted(Model(change), "all_to_all", loader_of(40), example_batch=tokens_of(LONG))


def plain(hidden, _):
    filler = torch.zeros(hidden.shape[:2])
    return (hidden + filler[..., None]).reshape(hidden.shape[0], -1, 2, HIDDEN // 2).flatten(-2)


@matrix(["all_to_all"], mode=MODES)
@on_ranks(2)
def test_layers_that_do_the_same_at_every_length_run_at_every_length(mode):
    def far_away(hidden, _):
        return hidden * 2 if hidden.shape[1] > 100 * LONG else hidden

    def numbered(hidden, _):
        order = torch.arange(hidden.shape[0] * hidden.shape[1])  # of tokens, as experts are given them
        return hidden.flatten(0, 1)[order].view_as(hidden)

    def unused(hidden, _):
        return hidden + 0 * torch.arange(hidden.shape[1])[:, None]

    for change in (far_away, numbered, plain):
        model, whole = boosted(Model(change), mode, loader_of(40)), Model(change)
        for length in (2, 60, LONG):
            torch.testing.assert_close(model(tokens_of(length)), whole(tokens_of(length)))
    model, whole = boosted(Model(unused), mode, loader_of(40), example_batch=tokens_of(LONG)), Model(unused)
    for length in (60, LONG):
        torch.testing.assert_close(model(tokens_of(length)), whole(tokens_of(length)))


@on_ranks(2)
def test_between_blocks_as_well():
    class Scaled(LlamaDecoderLayer):
        def forward(self, hidden_states, *args, **kwargs):
            return super().forward(branch(hidden_states, None), *args, **kwargs)

    class Sloped(LlamaDecoderLayer):
        def forward(self, hidden_states, *args, **kwargs):
            return super().forward(slopes(hidden_states, None), *args, **kwargs)

    for kind in (Scaled, Sloped):
        model = tiny_llama(num_hidden_layers=2, max_position_embeddings=2 * LONG)
        model.model.layers[1].__class__ = kind
        with pytest.raises(ConfigError, match="changes what"):
            boosted(model, "split_gather", tp_size=2, example_batch=tokens_of(LONG))


@on_ranks(2)
def test_blocks_that_get_whole_sequences_may_ask_for_their_length():
    class OfWhole(LlamaMLP):
        def forward(self, x):
            return super().forward(slopes(branch(x, None), None))

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
        check_sequences(Model(plain), ["blocks"], "all_to_all", sizes, torch.device("cpu"), [tokens_of(40)])


# ---- what an example shows


def same(hidden, _):
    return hidden


@on_ranks(2)
def test_lazy_models_are_checked_with_random_weights():
    class OwnScores(Layer):
        """Attends by code of its own."""

        def attend(self, query, key, value):
            return (query @ key.transpose(-1, -2)).softmax(-1) @ value

    for mode in MODES:
        with LazyInitContext():
            model, own = Model(same), Model(same, OwnScores)
        with pytest.raises(ConfigError, match="does not call its attention through"):
            boosted(own, mode, loader_of(16))
        boosted(model, mode, loader_of(16))


class Noisy(Model):
    """Draws numbers, writes to buffers and counts its calls; the check leaves one of its layers out."""

    def __init__(self):
        super().__init__(same, num_layers=3)
        self.dropout, self.norm, self.calls = nn.Dropout(0.1), nn.BatchNorm1d(HIDDEN), 0

    def embed(self, tokens):
        self.calls += 1
        return self.dropout(self.norm(super().embed(tokens).transpose(1, 2)).transpose(1, 2))


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_the_check_leaves_model_and_generators_as_they_are(mode):
    """Nothing of the model, the generators or the loader is changed by the check."""
    loader, before = loader_of(16), Noisy()
    boosted(Noisy(), mode, None, unchecked="allow")
    without = torch.get_rng_state()
    inside = boosted(Noisy(), mode, loader).unwrap()
    assert torch.equal(torch.get_rng_state(), without)
    assert inside.calls == 0
    for name, tensor in before.state_dict().items():
        assert torch.equal(inside.state_dict()[name], tensor), name
    assert all("forward" not in vars(each) for each in inside.modules() if not isinstance(each, Layer))
    assert inside.training


class Drawn(Dataset):
    """Samples whose lengths and values are each rank's own."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        rank = dist.get_rank()
        return torch.full((11 + rank,), rank)


@matrix(["ring_attn"], mode=MODES)
@on_ranks(2)
def test_a_batch_that_shows_little_is_no_reason(mode):
    """Too short to split, as many samples as positions, other ones on each rank, or not to be read at boost."""

    class Failing(Drawn):
        def __getitem__(self, index):
            if dist.get_rank() == 1:
                msg = "opened by the workers"
                raise RuntimeError(msg)
            return super().__getitem__(index)

    for loader in (loader_of(1), loader_of(2, samples=2), DataLoader(Drawn())):
        boosted(Noisy(), mode, loader)
        boosted(tiny_llama(num_hidden_layers=2), mode, loader)
    boosted(tiny_llama(num_hidden_layers=2), mode, DataLoader(Failing()))
    with pytest.raises(ConfigError, match=r"could not be checked.*there was no batch"):
        boosted(Noisy(), mode, DataLoader(Failing()))


@on_ranks(2)
def test_a_model_that_no_batch_shows_is_refused_unless_that_is_allowed():
    def boost(unchecked):
        model = tiny_llama(num_hidden_layers=1)
        model.__class__ = type("Undocumented", (type(model),), {"dummy_inputs": None})
        loader = DataLoader([{"unknown": row} for row in range(4)], batch_size=2)
        boosted(model, "ring_attn", loader, unchecked=unchecked)

    with pytest.raises(ConfigError, match=r"could not be checked.*unchecked='allow'"):
        boost("raise")
    boost("allow")
