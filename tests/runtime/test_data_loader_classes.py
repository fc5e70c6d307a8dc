"""Data loaders of a user's own class: split between ranks, or refused where the class iterates in a way of its own."""

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, WeightedRandomSampler

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_runtime.data.loader import DistributedDataLoader
from booster_runtime.data.shard import split_dataloader

SAMPLES = 22


class Named(DataLoader):
    """Has an attribute, a property and methods of its own, and leaves the iteration to torch."""

    def __init__(self, *args, factor=2, **kwargs):
        super().__init__(*args, **kwargs)
        self.factor = factor
        self.epoch = self.device = "the user's"
        self.chosen = []

    @property
    def half(self):
        return self.factor / 2

    def describe(self):
        return f"times {self.factor}, {self.batch_size} a batch"

    def set_epoch(self, epoch):
        self.chosen.append(epoch)


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(SAMPLES)


class EveryTenth:
    """A batch sampler."""

    def __iter__(self):
        for first in range(10):
            yield list(range(first, SAMPLES, 10))

    def __len__(self):
        return 10


def split(loader, world_size=2):
    return [split_dataloader(loader, rank=rank, world_size=world_size, seed=3) for rank in range(world_size)]


KINDS = {
    "in order": lambda kind: kind(range(SAMPLES), batch_size=4),
    "shuffled": lambda kind: kind(range(SAMPLES), batch_size=4, shuffle=True),
    "by a generator": lambda kind: kind(
        range(SAMPLES), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "by a sampler": lambda kind: kind(
        range(SAMPLES), batch_size=4, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)
    ),
    "by a batch sampler": lambda kind: kind(range(SAMPLES), batch_sampler=EveryTenth()),
    "a stream": lambda kind: kind(Stream(), batch_size=4),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_class_that_leaves_the_iteration_to_torch_is_split_as_a_plain_loader_is(make):
    plain = [[batch.tolist() for batch in loader] for loader in split(make(DataLoader))]
    own = [[batch.tolist() for batch in loader] for loader in split(make(Named))]
    assert own == plain


@pytest.mark.parametrize("world_size", [1, 2])
def test_attributes_properties_and_methods_of_the_class_stay(world_size):
    loader = split(Named(range(SAMPLES), batch_size=4, factor=10), world_size)[-1]
    assert isinstance(loader, Named)
    assert isinstance(loader, DistributedDataLoader)
    assert (type(loader).__name__, type(loader).__module__) == ("Named", __name__)
    assert (loader.factor, loader.half, loader.describe()) == (10, 5, "times 10, 4 a batch")
    assert (loader.epoch, loader.device) == (0, None), "a split loader's own come first"


def test_the_classs_set_epoch_is_called_too():
    loader = split(Named(range(SAMPLES), batch_size=4, shuffle=True))[0]
    first, second = list(loader), list(loader)
    assert loader.chosen == [0, 1, 1, 2]
    assert loader.epoch == 2
    assert [batch.tolist() for batch in first] != [batch.tolist() for batch in second]


class Doubled(DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield 2 * batch


class OwnIterators(DataLoader):
    def _get_iterator(self):
        return iter([])


OWN = {
    Doubled: "`__iter__`",
    OwnIterators: "`_get_iterator`",
}


@pytest.mark.parametrize("kind", OWN)
def test_a_class_with_methods_that_a_split_loader_needs_is_refused(kind):
    match = (
        rf"is a `{kind.__name__}`, whose own {OWN[kind]} may not follow.*wrap the loader that `boost` returns.*"
        r"`torch\.utils\.data\.DistributedSampler`, or leave it out of `boost`"
    )
    for rank in range(2):
        with pytest.raises(ConfigError, match=match):
            split_dataloader(kind(range(8)), rank=rank, world_size=2, seed=3)


@pytest.mark.parametrize("kind", OWN)
def test_what_is_not_to_be_split_is_kept(kind):
    """One rank's, and one that splits samples itself."""
    loader = kind(range(8), batch_size=2)
    assert split(loader, world_size=1)[0] is loader
    for rank in range(2):
        loader = kind(range(8), sampler=DistributedSampler(range(8), 2, rank))
        assert split_dataloader(loader, rank=rank, world_size=2, seed=3) is loader


@pytest.mark.parametrize(("num_replicas", "rank"), [(2, 0), (4, 1), (1, 0)])
def test_samples_split_for_other_ranks_are_refused(num_replicas, rank):
    loader = DataLoader(range(8), sampler=DistributedSampler(range(8), num_replicas, rank))
    match = rf"`rank={rank}` of `num_replicas={num_replicas}`, but .* this is rank 1 of 2.*without the sampler"
    with pytest.raises(ConfigError, match=match):
        split_dataloader(loader, rank=1, world_size=2, seed=3)


class OwnPosition(DataLoader):
    def state_dict(self):
        return {"position": 3}

    def load_state_dict(self, state):
        pass


class NoLoader:
    def __iter__(self):
        yield torch.ones(1)


class Reader(NoLoader):
    """A loader of another library."""

    state_dict, load_state_dict = OwnPosition.state_dict, OwnPosition.load_state_dict


class EveryFifth(EveryTenth):
    sampler = WeightedRandomSampler([1.0] * 8, 8)


KEPT = {
    "of another library": Reader,
    "a stream": lambda: OwnPosition(Stream()),
    "a batch sampler": lambda: OwnPosition(range(SAMPLES), batch_sampler=EveryTenth()),
    "split by rank": lambda: OwnPosition(range(8), sampler=DistributedSampler(range(8), 2, 1)),
}


@pytest.mark.parametrize("make", KEPT.values(), ids=KEPT)
def test_a_loader_that_keeps_a_position_is_taken_as_it_is(make):
    loader = make()
    assert split_dataloader(loader, rank=1, world_size=2, seed=3) is loader


def test_boost_returns_the_loader_of_another_library():
    loader = Reader()
    assert Booster("cpu").boost(torch.nn.Linear(1, 1), dataloader=[loader, DataLoader(range(4))])[3][0] is loader


@pytest.mark.parametrize("settings", [{}, {"shuffle": True}, {"batch_sampler": EveryFifth()}])
def test_one_that_is_not_split_is_refused(settings):
    with pytest.raises(ConfigError, match=r"`OwnPosition`.*whole data set on every rank.*DistributedSampler\(dataset"):
        split_dataloader(OwnPosition(range(8), **settings), rank=1, world_size=2, seed=3)
    assert split(OwnPosition(range(8), **settings), world_size=1)


def test_what_is_no_loader_is_refused():
    with pytest.raises(TypeError, match=r"must be a torch.utils.data.DataLoader, or a loader.*got `NoLoader`"):
        Booster("cpu").boost(torch.nn.Linear(1, 1), dataloader=NoLoader())
