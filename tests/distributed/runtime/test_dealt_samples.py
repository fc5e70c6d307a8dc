"""Data loaders on real ranks: one order for all, and each sample counted once in an evaluation."""

import random

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, SequentialSampler, WeightedRandomSampler

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_core.ranks.coordinator import DistCoordinator
from booster_runtime import gather_for_metrics
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.mutants import ReferencePlugin

COUNT = 9


class Features(torch.utils.data.Dataset):
    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return index, torch.full((4,), index / COUNT)


class FeatureStream(IterableDataset):
    def __iter__(self):
        return (Features()[index] for index in range(COUNT))


def model_of():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def evaluate(is_stream, how):
    booster = Booster("cpu", plugin=ReferencePlugin())
    data = FeatureStream() if is_stream else Features()
    plain = DataLoader(data, batch_size=4) if how == "boost" else None
    module = model_of()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, _, _, loader, _ = booster.boost(module, optimizer, None, plain)
    if loader is None:
        loader = booster.prepare_dataloader(data, 4)
    model.eval()
    gathered = []
    with torch.no_grad():
        for indices, x in loader:
            gathered.append(gather_for_metrics(booster, {"indices": indices, "scores": model(x)}, loader))
    return {name: torch.cat([each[name] for each in gathered]) for name in ("indices", "scores")}


@pytest.mark.parametrize(("is_stream", "how"), [(False, "boost"), (True, "boost"), (False, "prepare_dataloader")])
def test_an_evaluation_counts_each_sample_once_in_order(is_stream, how):
    with torch.no_grad():
        expected = model_of()(torch.stack([Features()[index][1] for index in range(COUNT)]))
    for values in run_on_ranks(evaluate, 2, is_stream, how):
        assert values["indices"].tolist() == list(range(COUNT))
        torch.testing.assert_close(values["scores"], expected)


def gather_what_does_not_fit():
    booster = Booster("cpu", plugin=ReferencePlugin())
    loader = booster.prepare_dataloader(range(COUNT), 2)
    batch = next(iter(loader))
    gather_for_metrics(booster, batch if DistCoordinator().rank == 0 else batch[:1], loader)


def test_values_that_do_not_fit_one_rank_raise_on_every_rank():
    expect_on_ranks(ConfigError, r"shape \(1,\) has not one value per sample", gather_what_does_not_fit, 2)


def deal(make_loader, seeds, epochs=2):
    rank = DistCoordinator().rank
    if seeds == "apart":
        torch.manual_seed(1000 + rank)
        random.seed(rank)
    elif seeds == "large":
        torch.manual_seed(2**63 - 1)
    else:
        torch.manual_seed(torch.Generator().initial_seed())  # what torch starts with
    module = nn.Linear(4, 2)
    booster = Booster("cpu", plugin=ReferencePlugin())
    loader = booster.boost(module, torch.optim.SGD(module.parameters(), lr=0.1), None, make_loader()).dataloader
    return [[sample for batch in loader for sample in batch.tolist()] for _ in range(epochs)]


def shuffled():
    return DataLoader(range(24), batch_size=4, shuffle=True)


def weighted():
    return DataLoader(range(24), batch_size=4, sampler=WeightedRandomSampler([1.0, 3.0] * 12, 48))


def buckets():
    return DataLoader(range(24), batch_sampler=[[0, 1, 2], [3], [4, 5, 6, 7, 8], list(range(9, 24))])


@pytest.mark.covering(1)  # every seed with one of the loaders; the other pairs are slow
@pytest.mark.parametrize("seeds", ["apart", "default", "large"])
@pytest.mark.parametrize("make_loader", [shuffled, buckets])
def test_each_sample_is_dealt_to_one_rank_under_any_seed(make_loader, seeds):
    ranks = run_on_ranks(deal, 2, make_loader, seeds)
    for epoch in range(2):
        assert sorted(sample for rank in ranks for sample in rank[epoch]) == list(range(24))
    assert (ranks[0][0] == ranks[0][1]) == (make_loader is buckets)


@pytest.mark.parametrize("seeds", ["apart", "large"])
def test_a_weighted_order_is_the_same_for_any_number_of_ranks(seeds):
    (alone,), ranks = run_on_ranks(deal, 1, weighted, seeds), run_on_ranks(deal, 2, weighted, seeds)
    for epoch in range(2):
        assert [sample for turn in zip(ranks[0][epoch], ranks[1][epoch], strict=True) for sample in turn] == alone[
            epoch
        ]


class KnowsItsRank(Sampler):
    """Splits samples by rank itself, without being one of torch's samplers that do."""

    def __iter__(self):
        return iter(range(DistCoordinator().rank, 24, 2))

    def __len__(self):
        return 12


class SeededByRank(Sampler):
    def __init__(self):
        self.random = random.Random(DistCoordinator().rank)

    def __iter__(self):
        return iter(self.random.sample(range(24), 24))

    def __len__(self):
        return 24


class BreaksOnOneRank(SequentialSampler):
    def __iter__(self):
        if DistCoordinator().rank == 1:
            msg = "no such file"
            raise OSError(msg)
        return super().__iter__()


def boost_with(sampler_class):
    sampler = sampler_class(range(24)) if sampler_class is BreaksOnOneRank else sampler_class()
    Booster("cpu", plugin=ReferencePlugin()).boost(nn.Linear(2, 2), dataloader=DataLoader(range(24), sampler=sampler))


@pytest.mark.parametrize("sampler_class", [KnowsItsRank, SeededByRank])
def test_orders_that_differ_between_ranks_are_refused_on_every_rank(sampler_class):
    expect_on_ranks(ConfigError, "draws another order on rank 1 than on rank 0", boost_with, 2, sampler_class)


def test_a_sampler_that_fails_on_one_rank_fails_on_every_rank():
    expect_on_ranks(OSError, "no such file", boost_with, 2, BreaksOnOneRank)


def train_after_a_peek(peeks, resets):
    """Train in step for two epochs, after some ranks took one batch to look at it."""
    booster = Booster("cpu", plugin=ReferencePlugin())
    loader = DataLoader(Features(), batch_size=1, shuffle=True)
    module = model_of()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer, _, loader, _ = booster.boost(module, optimizer, None, loader)
    if DistCoordinator().rank in peeks:
        next(iter(loader))
    if resets:
        loader.set_epoch(0)
    seen = []
    for _ in range(2):
        for indices, x in loader:
            booster.backward(model(x).square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
            seen += indices.tolist()
    return seen


def test_a_batch_that_is_taken_on_one_rank_only_is_told_on_every_rank():
    expect_on_ranks(ConfigError, "Ranks follow different epochs of the data loader", train_after_a_peek, 2, [0], False)


@pytest.mark.parametrize(("peeks", "resets"), [([], False), ([0, 1], False), ([1], True)])
def test_ranks_that_agree_on_the_epoch_are_not_disturbed(peeks, resets):
    ranks = run_on_ranks(train_after_a_peek, 2, peeks, resets)
    for epoch in range(2):
        assert {sample for rank in ranks for sample in rank[5 * epoch : 5 * epoch + 5]} == set(range(COUNT))
