"""Each sample counts once in metrics, although ranks make equally many steps."""

import pytest
import torch
from ranked import on_ranks
from reference_plugins import ReferencePlugin
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_core.ranks.coordinator import DistCoordinator
from booster_runtime import evaluate_batch, gather_for_metrics
from booster_runtime.data.prepare import prepare_dataloader
from booster_runtime.data.shard import split_dataloader


class Stream(IterableDataset):
    """The numbers below a count; workers share them out."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(first, self.count, step))


def evaluate(loader):
    """Return the size of each batch, and what of them counts."""
    sizes, counted = [], []
    for batch in loader:
        sizes.append(len(batch))
        counted += loader.without_padding({"x": (batch, batch + 1)})["x"][0].tolist()
    return sizes, counted


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("count", "world_size"), [(9, 2), (8, 2), (10, 3), (11, 4), (24, 3), (5, 4)])
def test_each_sample_is_counted_once(count, world_size, is_stream, num_workers):
    if num_workers and count not in (9, 11):
        num_workers = 0
    data = Stream(count) if is_stream else range(count)
    ranks = [
        evaluate(prepare_dataloader(data, 4, rank=rank, world_size=world_size, num_workers=num_workers))
        for rank in range(world_size)
    ]
    sizes = [sizes for sizes, _ in ranks]
    assert all(each == sizes[0] for each in sizes), "ranks make equal steps"
    assert sorted(sample for _, counted in ranks for sample in counted) == list(range(count))


@pytest.mark.parametrize("shuffle", [False, True])
def test_samples_are_counted_once_in_every_epoch_and_after_a_resume(shuffle):
    ranks = [prepare_dataloader(range(13), 2, shuffle=shuffle, rank=rank, world_size=3) for rank in range(3)]
    for _ in range(2):
        counted = [sample for loader in ranks for sample in evaluate(loader)[1]]
        assert sorted(counted) == list(range(13))
    first = [next(iter(loader)).tolist() for loader in ranks]
    two = [prepare_dataloader(range(13), 2, shuffle=shuffle, rank=rank, world_size=2) for rank in range(2)]
    for loader in two:
        loader.load_state_dict(ranks[0].state_dict())
    rest = [sample for loader in two for sample in evaluate(loader)[1]]
    assert sorted(sum(first, rest)) == list(range(13))


def test_whole_batches_are_left_out_where_they_are_repeated():
    batches = [[0, 1, 2], [3], [4, 5]]
    ranks = [
        split_dataloader(DataLoader(range(6), batch_sampler=batches), rank=rank, world_size=2, seed=0)
        for rank in range(2)
    ]
    sizes = [evaluate(loader) for loader in ranks]
    assert sizes == [([3, 2], [0, 1, 2, 4, 5]), ([1, 3], [3])]


def test_with_drop_last_nothing_is_repeated():
    ranks = [prepare_dataloader(range(11), 2, drop_last=True, rank=rank, world_size=2) for rank in range(2)]
    assert [evaluate(loader) for loader in ranks] == [([2, 2], [0, 2, 4, 6]), ([2, 2], [1, 3, 5, 7])]


def test_values_that_are_not_one_per_sample_are_refused():
    loader = prepare_dataloader(range(8), 4, rank=0, world_size=2)
    next(iter(loader))
    assert loader.without_padding(torch.ones(4, 3)).shape == (4, 3)
    with pytest.raises(ConfigError, match=r"shape \(3,\) has not one value per sample.*, 4 here"):
        loader.without_padding(torch.ones(3))
    with pytest.raises(ConfigError, match=r"shape \(\) has not one value"):
        loader.without_padding(torch.tensor(1.0))
    with pytest.raises(TypeError, match="Values per sample are tensors; got `float`"):
        loader.without_padding({"loss": 0.5})


def test_one_process_gathers_what_it_has():
    booster = Booster()
    loader = booster.prepare_dataloader(range(5), 2)
    gathered = [gather_for_metrics(booster, (batch * 2, {"y": batch}), loader) for batch in loader]
    assert torch.cat([double for double, _ in gathered]).tolist() == [0, 2, 4, 6, 8]
    assert gathered[-1][1]["y"].tolist() == [4]
    with pytest.raises(TypeError, match="is the loader that `boost` or `prepare_dataloader` returned"):
        gather_for_metrics(booster, torch.ones(2), DataLoader(range(4), batch_size=2))


@pytest.mark.parametrize("weight", [None, len])
@pytest.mark.parametrize(("count", "world_size"), [(7, 1), (7, 2), (9, 2), (8, 2), (5, 4)])
@on_ranks("world_size")
def test_the_mean_loss_counts_each_sample_once(count, world_size, weight):
    torch.manual_seed(2)
    data = torch.randn(count, 8)
    booster = Booster("cpu", plugin=ReferencePlugin() if DistCoordinator().world_size > 1 else None)
    loader = DataLoader(data, batch_size=4 // DistCoordinator().world_size)
    model, _, _, loader, _ = booster.boost(torch.nn.Linear(8, 1), dataloader=loader)
    batches, found, gathered = iter(loader), [], []
    for _ in range(len(loader)):
        found.append(evaluate_batch(booster, batches, model, lambda out, _: out.square().mean(), weight=weight))
        gathered += gather_for_metrics(booster, found[-1].outputs, loader).flatten().tolist()
    total = sum(each.weight for each in found)
    loss = float(sum(each.loss * each.weight for each in found) / total)
    outputs = torch.tensor(gathered)
    assert len(outputs) == count
    assert loss == pytest.approx(float(outputs.square().mean()), rel=1e-5)
