"""Data loaders of a user's own class, dealt to ranks."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from booster_core.errors import ConfigError
from booster_runtime.data.shard import split_dataloader

SAMPLES = 22


class Doubled(DataLoader):
    """Changes each batch, and has an attribute, a property and a method of its own."""

    def __init__(self, *args, factor=2, **kwargs):
        super().__init__(*args, **kwargs)
        self.factor = factor

    @property
    def half(self):
        return self.factor / 2

    def describe(self):
        return f"times {self.factor}, {self.batch_size} a batch"

    def __iter__(self):
        for batch in super().__iter__():
            yield self.factor * batch


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


def dealt(loader, world_size=2):
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
def test_an_iteration_of_the_users_class_sees_this_ranks_batches(make):
    plain = [[batch.tolist() for batch in loader] for loader in dealt(make(DataLoader))]
    own = [[batch.tolist() for batch in loader] for loader in dealt(make(Doubled))]
    assert own == [[[2 * sample for sample in batch] for batch in batches] for batches in plain]


def test_attributes_properties_and_methods_of_the_class_stay():
    loader = dealt(Doubled(range(SAMPLES), batch_size=4, factor=10))[1]
    assert isinstance(loader, Doubled)
    assert type(loader).__name__ == "Doubled"
    assert (loader.factor, loader.half, loader.describe()) == (10, 5, "times 10, 4 a batch")
    assert next(iter(loader)).tolist() == [10, 30, 50, 70]


def test_the_users_own_loader_is_left_as_it_was():
    loader = Doubled(range(8), batch_size=4)
    dealt(loader)
    assert type(loader) is Doubled
    assert [batch.tolist() for batch in loader] == [[0, 2, 4, 6], [8, 10, 12, 14]]


def test_a_position_is_resumed_and_padding_left_out():
    first = dealt(Doubled(range(SAMPLES), batch_size=4))[1]
    iterator = iter(first)
    next(iterator)
    state = first.state_dict()
    rest = [batch.tolist() for batch in iterator]
    again = dealt(Doubled(range(SAMPLES), batch_size=4))[1]
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == rest
    odd = dealt(Doubled(range(21), batch_size=4))[1]
    seen = [odd.without_padding(batch).tolist() for batch in odd]
    assert [sample for batch in seen for sample in batch] == [2 * sample for sample in range(1, 21, 2)]


class ReadsAhead(DataLoader):
    def __iter__(self):
        iterator = super().__iter__()
        ahead = next(iterator)
        for batch in iterator:
            yield ahead
            ahead = batch
        yield ahead


class IteratesItself(DataLoader):
    def __iter__(self):
        yield from self.dataset


class LeavesOut(DataLoader):
    def __iter__(self):
        return (batch for number, batch in enumerate(super().__iter__()) if number % 2)


class Repeats(DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield batch
            yield batch


@pytest.mark.parametrize(
    ("kind", "counts"), [(ReadsAhead, (1, 2)), (IteratesItself, (1, 0)), (LeavesOut, (1, 2)), (Repeats, (2, 1))]
)
def test_an_iteration_that_hands_out_other_batches_than_it_draws_raises(kind, counts):
    handed_out, drawn = counts
    for loader in dealt(kind(range(SAMPLES), batch_size=4)):
        with pytest.raises(ConfigError, match=rf"handed out {handed_out} .* drawn {drawn} "):
            list(loader)


def test_a_class_that_makes_its_iterators_itself_is_refused():
    class OwnIterators(DataLoader):
        def _get_iterator(self):
            return iter([])

    with pytest.raises(ConfigError, match="`OwnIterators` with a `_get_iterator` of its own"):
        dealt(OwnIterators(range(8)))


@pytest.mark.parametrize("kind", [Doubled, IteratesItself, ReadsAhead])
def test_one_rank_keeps_a_loader_that_iterates_itself(kind):
    loader = kind(range(8), batch_size=2)
    assert dealt(loader, world_size=1)[0] is loader
