"""What a batch of the data loader shows of split sequences is refused at `boost`; nothing else is changed by that."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from matrix import matrix
from ranked import on_ranks
from torch import nn
from torch.utils.data import DataLoader, Dataset

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_hybrid.policy.base import ShardingPolicy
from booster_runtime import LazyInitContext
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.models import tiny_llama

HIDDEN, HEADS = 16, 4
MODES = ("all_to_all", "ring_attn")


class Layer(nn.Module):
    """Attention by torch's function, or by code of its own."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden, shown=None):
        batch, length, _ = hidden.shape
        query, key, value = self.qkv(hidden).view(batch, length, 3 * HEADS, -1).transpose(1, 2).chunk(3, 1)
        if self.kind == "own scores":
            found = (query @ key.transpose(-1, -2)).softmax(-1) @ value
        elif self.kind == "none":
            found = value
        else:
            mask = None if shown is None else shown[:, None, None, :].expand(-1, -1, length, -1)
            found = nn.functional.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
        return hidden + self.out(found.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, *kinds):
        super().__init__()
        self.table = nn.Embedding(32, HIDDEN)
        self.blocks = nn.ModuleList(Layer(kind) for kind in kinds)
        self.dropout, self.norm = nn.Dropout(0.1), nn.BatchNorm1d(HIDDEN)
        self.calls = 0

    def forward(self, tokens):
        self.calls += 1
        hidden = self.dropout(self.norm(self.table(tokens).transpose(1, 2)).transpose(1, 2))
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def plain(*kinds):
    torch.manual_seed(0)
    return Model(*kinds)


def boosted(model, mode, loader, **options):
    policy = ShardingPolicy(layers=("blocks",)) if isinstance(model, Model) else None
    plugin = HybridParallelPlugin(sp_size=2, sequence_parallelism_mode=mode, custom_policy=policy, **options)
    booster = Booster("cpu", plugin=plugin)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    model, optimizer, _, loader, _ = booster.boost(model, optimizer, dataloader=loader)
    return booster, model, optimizer


def loader_of(length, samples=4):
    return DataLoader([torch.arange(row, row + length) % 32 for row in range(samples)], batch_size=samples)


def lazy(kind):
    with LazyInitContext():
        model = plain(kind)
        model.norm = nn.Identity()  # what layers are given might depend on a buffer, which has no values
    return model


@on_ranks(2)
def test_lazy_models_are_checked_with_random_weights():
    for mode in MODES:
        with pytest.raises(ConfigError, match="does not call its attention through"):
            boosted(lazy("own scores"), mode, loader_of(16))
        boosted(lazy("torch's"), mode, loader_of(16))


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_the_check_leaves_model_and_generators_as_they_are(mode):
    """Nothing of the model, the generators or the loader is changed by the check."""
    loader = loader_of(16)
    torch.manual_seed(3)
    kinds = ["torch's"] * 3  # of which the check leaves one out
    before = plain(*kinds)
    torch.manual_seed(7)
    _, model, _ = boosted(plain(*kinds), mode, None, unchecked="allow")
    without = torch.get_rng_state()
    torch.manual_seed(7)
    _, model, _ = boosted(plain(*kinds), mode, loader)
    assert torch.equal(torch.get_rng_state(), without)
    inside = model.unwrap()
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


class Failing(Drawn):
    def __getitem__(self, index):
        if dist.get_rank() == 1:
            msg = "opened by the workers"
            raise RuntimeError(msg)
        return super().__getitem__(index)


@matrix(["ring_attn"], mode=MODES)
@on_ranks(2)
def test_a_batch_that_shows_little_is_no_reason(mode):
    """Too short to split, as many samples as positions, other ones on each rank, or not to be read at boost."""
    for loader in (loader_of(1), loader_of(2, samples=2), DataLoader(Drawn())):
        boosted(plain("torch's"), mode, loader)
        boosted(tiny_llama(num_hidden_layers=2), mode, loader)
    boosted(tiny_llama(num_hidden_layers=2), mode, DataLoader(Failing()))
    with pytest.raises(ConfigError, match=r"could not be checked.*there was no batch"):
        boosted(plain("torch's"), mode, DataLoader(Failing()))


def unreadable(unchecked):
    model = tiny_llama(num_hidden_layers=1)
    model.__class__ = type("Undocumented", (type(model),), {"dummy_inputs": None})
    loader = DataLoader([{"unknown": row} for row in range(4)], batch_size=2)
    boosted(model, "ring_attn", loader, unchecked=unchecked)


def test_a_model_that_no_batch_shows_is_refused_unless_that_is_allowed():
    expect_on_ranks(ConfigError, r"could not be checked.*unchecked='allow'", unreadable, 2, "raise")
    run_on_ranks(unreadable, 2, "allow")
