"""Data loaders on real ranks: one order for all, and each sample counted once in an evaluation."""

import random
from types import SimpleNamespace

import pytest
import torch
from matrix import matrix
from ranked import on_ranks, raises_on_ranks
from reference_plugins import ReferencePlugin
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_core.ranks.coordinator import DistCoordinator
from booster_runtime import MixedStreams, PackedDocuments, gather_for_metrics
from booster_testing import expect_on_ranks

COUNT = 9


class Features(Dataset):
    """Samples that tell their number."""

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


def boost(dataloader):
    booster, module = Booster("cpu", plugin=ReferencePlugin()), model_of()
    return booster, booster.boost(module, torch.optim.SGD(module.parameters(), lr=0.1), dataloader=dataloader)


@pytest.mark.parametrize(("is_stream", "how"), [(False, "boost"), (True, "boost"), (False, "prepare_dataloader")])
@on_ranks(2)
def test_an_evaluation_counts_each_sample_once_in_order(is_stream, how):
    data = FeatureStream() if is_stream else Features()
    booster, (model, _, _, loader, _) = boost(DataLoader(data, batch_size=4) if how == "boost" else None)
    if loader is None:
        loader = booster.prepare_dataloader(data, 4)
    model.eval()
    with torch.no_grad():
        gathered = [gather_for_metrics(booster, (indices, model(x)), loader) for indices, x in loader]
        expected = model_of()(torch.stack([Features()[index][1] for index in range(COUNT)]))
    indices, scores = (torch.cat(each) for each in zip(*gathered, strict=True))
    assert indices.tolist() == list(range(COUNT))
    torch.testing.assert_close(scores, expected)


@raises_on_ranks(ConfigError, r"shape \(1,\) has not one value per sample", 2)
def test_values_that_do_not_fit_one_rank_raise_on_every_rank():
    booster = Booster("cpu", plugin=ReferencePlugin())
    loader = booster.prepare_dataloader(range(COUNT), 2)
    batch = next(iter(loader))
    gather_for_metrics(booster, batch if DistCoordinator().rank == 0 else batch[:1], loader)


@matrix(1, make_loader=["shuffled", "buckets"], seeds=["apart", "default", "large"])
@on_ranks(2)
def test_each_sample_is_dealt_to_one_rank_under_any_seed(make_loader, seeds):
    rank = DistCoordinator().rank
    if seeds == "apart":
        torch.manual_seed(1000 + rank)
        random.seed(rank)
    elif seeds == "large":
        torch.manual_seed(2**63 - 1)
    else:
        torch.manual_seed(torch.Generator().initial_seed())  # what torch starts with
    buckets = [[0, 1, 2], [3], [4, 5, 6, 7, 8], list(range(9, 24))]
    order = {"shuffled": {"batch_size": 4, "shuffle": True}, "buckets": {"batch_sampler": buckets}}[make_loader]
    plain = DataLoader(range(24), **order)
    loader = Booster("cpu", plugin=ReferencePlugin()).boost(nn.Linear(4, 2), dataloader=plain).dataloader
    epochs = [[sample for batch in loader for sample in batch.tolist()] for _ in range(2)]
    for epoch in epochs:
        ours, theirs = DistCoordinator().all_gather_object(epoch)
        assert sorted(ours + theirs) == list(range(24))
    assert (epochs[0] == epochs[1]) == (make_loader == "buckets")


@raises_on_ranks(
    ConfigError,
    r"disagree about `order of the data loader's sampler`: .* on rank 0, .* on rank 1.*split between ranks",
    2,
)
def test_orders_that_differ_between_ranks_are_refused_on_every_rank():
    class KnowsItsRank(Sampler):
        """Splits samples by rank itself, without being one of torch's samplers that do."""

        def __iter__(self):
            return iter(range(DistCoordinator().rank, 24, 2))

        def __len__(self):
            return 12

    boost(DataLoader(range(24), sampler=KnowsItsRank()))


@raises_on_ranks(OSError, "no such file", 2)
def test_a_sampler_that_fails_on_one_rank_fails_on_every_rank():
    class BreaksOnOneRank(SequentialSampler):
        def __iter__(self):
            if DistCoordinator().rank == 1:
                msg = "no such file"
                raise OSError(msg)
            return super().__iter__()

    boost(DataLoader(range(24), sampler=BreaksOnOneRank(range(24))))


class SizedStream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(range(self.length))


def loader_of(kind, length):
    """Return a loader over a data set of a length."""
    if kind == "prepared":
        return Booster("cpu", plugin=ReferencePlugin()).prepare_dataloader(range(length), 2)
    if kind == "prepared stream":
        return Booster("cpu", plugin=ReferencePlugin()).prepare_dataloader(SizedStream(length), 2)
    if kind == "stream":
        return DataLoader(SizedStream(length), batch_size=2)
    if kind == "distributed":
        return DataLoader(range(length), batch_size=2, sampler=DistributedSampler(range(length)))
    if kind == "sampler":
        return DataLoader(range(length), batch_size=2, sampler=WeightedRandomSampler([1.0] * length, 6))
    return DataLoader(range(length), batch_size=2, shuffle=kind == "shuffled")


def boost_over(kind, lengths):
    length = lengths[DistCoordinator().rank]
    loader = loader_of(kind, length)
    return len(Booster("cpu", plugin=ReferencePlugin()).boost(nn.Linear(2, 2), dataloader=loader).dataloader)


KINDS = ["plain", "shuffled", "sampler", "stream", "distributed", "prepared", "prepared stream"]


@pytest.mark.parametrize("kind", KINDS)
def test_data_sets_of_other_lengths_on_some_ranks_raise_on_every_rank(kind):
    match = (
        r"data loader's data set`: 13 on ranks 0 and 2, 14 on rank 1.*Pass the whole data set.*"
        r"`torch\.utils\.data\.DistributedSampler`"
    )
    expect_on_ranks(ConfigError, match, boost_over, 3, kind, [13, 14, 13])


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_data_sets_of_one_length_are_split(kind):
    assert boost_over(kind, [13, 13]) == (2 if kind == "sampler" else 4)


@raises_on_ranks(ConfigError, "length of its sampler`: 3000 on rank 0, 3001 on rank 1", 2)
def test_samplers_of_other_lengths_on_some_ranks_raise_on_every_rank():
    boost(DataLoader(range(4000), sampler=range(3000 + DistCoordinator().rank)))


class SplitStream(IterableDataset):
    """Tells that it is split, as streams of the library `datasets` do."""

    def __init__(self, attribute, world_size):
        setattr(self, attribute, SimpleNamespace(rank=DistCoordinator().rank, world_size=world_size))

    def __iter__(self):
        return iter(range(DistCoordinator().rank, 8, 2))


def load_split(attribute, world_size, how):
    booster = Booster("cpu", plugin=ReferencePlugin())
    data = SplitStream(attribute, world_size)
    if how == "packed mixture":
        data = PackedDocuments(MixedStreams([(range(4), 1.0), (data, 1.0)], seed=0), 2)
    if how == "boost":
        loader = booster.boost(nn.Linear(2, 2), dataloader=DataLoader(data, batch_size=2)).dataloader
    else:
        loader = booster.prepare_dataloader(data, 2)
    return sum(len(batch) for batch in loader)


@pytest.mark.parametrize("attribute", ["_distributed", "distributed"])
@pytest.mark.parametrize("how", ["boost", "prepare_dataloader", "packed mixture"])
def test_a_data_set_that_tells_that_it_is_split_raises(attribute, how):
    match = r"split between 2 ranks already.*Leave `split_dataset_by_node` out"
    expect_on_ranks(ConfigError, match, load_split, 2, attribute, 2, how)


@pytest.mark.parametrize("how", ["boost", "prepare_dataloader"])
@on_ranks(2)
def test_a_data_set_that_is_split_among_one_rank_is_whole(how):
    assert load_split("_distributed", 1, how) == 2


@on_ranks(1)
def test_one_process_may_take_a_share():
    assert load_split("_distributed", 2, "boost") == 4


@on_ranks(2)
def test_a_loader_over_a_stream_without_a_length_has_none():
    loader = Booster("cpu", plugin=ReferencePlugin()).prepare_dataloader(FeatureStream(), 2)
    with pytest.raises(TypeError, match="'FeatureStream' has no len"):
        len(loader)
    assert len(list(loader)) == 3


def train_after_a_peek(peeks, resets=False):
    """Train in step for two epochs, after some ranks took one batch to look at it."""
    booster, (model, optimizer, _, loader, _) = boost(DataLoader(Features(), batch_size=1, shuffle=True))
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
    expect_on_ranks(ConfigError, "Ranks follow different epochs of the data loader", train_after_a_peek, 2, [0])


@pytest.mark.parametrize(("peeks", "resets"), [([], False), ([0, 1], False), ([1], True)])
@on_ranks(2)
def test_ranks_that_agree_on_the_epoch_are_not_disturbed(peeks, resets):
    seen = train_after_a_peek(peeks, resets)
    for epoch in (seen[:5], seen[5:]):
        ours, theirs = DistCoordinator().all_gather_object(epoch)
        assert {*ours, *theirs} == set(range(COUNT))
