"""Ranks that train on the same batch are told once; only training is looked at."""

import copy
import pickle

import pytest
import torch
from log_records import Records
from ranked import on_ranks
from reference_plugins import ReferencePipelinePlugin, ReferencePlugin
from torch import nn
from torch.utils.data import DataLoader

from booster_core import Booster
from booster_core.ranks.coordinator import DistCoordinator


class SharesSamples(ReferencePlugin):
    """Has ranks that work on one batch together."""

    def data_parallel_coordinates(self, coordinator):
        return 0, 1


def train(feed, accumulate=1, before=None):
    """Train in the way that ``feed`` names, and return what the project's logger said on this rank."""
    rank = DistCoordinator().rank
    torch.manual_seed(rank if feed == "seeded by rank" else 3)
    data = torch.randn(32, 8)
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1))
    booster = Booster("cpu", plugin=SharesSamples() if feed == "shared" else ReferencePlugin())
    loader = DataLoader(data, batch_size=4, shuffle=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    passed = loader if feed == "boosted loader" else None
    with Records() as records:
        model, optimizer, _, boosted, _ = booster.boost(module, optimizer, None, passed)
        if feed != "separate by themselves":
            torch.manual_seed(rank if feed == "seeded by rank" else 3)
        if before is not None:
            before(model)
        batches = iter(boosted if passed is not None else loader)
        for _ in range(4):
            for micro in range(accumulate):
                x = next(batches) if "loader" in feed else torch.randn(4, 8)
                with booster.no_sync(model, optimizer) if micro < accumulate - 1 else torch.enable_grad():
                    booster.backward(model(x).square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        assert not model._forward_pre_hooks, "nothing is left in the way of a step"
    return records.texts


@pytest.mark.parametrize(("feed", "accumulate"), [("equal seeds", 1), ("plain loader", 1), ("equal seeds", 3)])
@on_ranks(2)
def test_equal_batches_are_told_once_on_rank_0(feed, accumulate):
    texts = train(feed, accumulate)
    assert len(texts) == (DistCoordinator().rank == 0)
    assert all("ranks 0 and 1 got the same first batch" in text for text in texts)
    assert all("Pass the data loader to `boost`" in text for text in texts)


@pytest.mark.parametrize("feed", ["separate by themselves", "seeded by rank", "boosted loader", "shared"])
@on_ranks(2)
def test_batches_of_ones_own_are_not_told(feed):
    assert train(feed) == []


@pytest.mark.parametrize("is_same", [True, False])
@on_ranks(2)
def test_batches_of_a_pipeline_are_looked_at(is_same):
    rank = DistCoordinator().rank
    with Records() as records:
        booster, module = Booster("cpu", plugin=ReferencePipelinePlugin()), nn.Linear(8, 1)
        model, optimizer, *_ = booster.boost(module, torch.optim.SGD(module.parameters(), lr=0.1))
        torch.manual_seed(3 if is_same else rank)
        batches = iter([{"input": torch.randn(4, 8)} for _ in range(4)])
        for _ in range(4):
            booster.execute_pipeline(batches, model, lambda outputs, _: outputs.square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
    assert len(records.texts) == (is_same and rank == 0)


def copy_and_pickle(model):
    copy.deepcopy(model.unwrap())
    for check in list(model._forward_pre_hooks.values()):
        pickle.loads(pickle.dumps(check))(model, (torch.ones(1),), {})
        copy.deepcopy(check)(model, (torch.ones(1),), {})


def evaluate_first(model):
    model.eval()
    model(torch.ones(2, 8))
    model.train()
    with torch.no_grad():
        model(torch.ones(2, 8))


@pytest.mark.parametrize("before", [copy_and_pickle, evaluate_first])
@on_ranks(2)
def test_only_training_is_looked_at(before):
    assert train("seeded by rank", before=before) == []
