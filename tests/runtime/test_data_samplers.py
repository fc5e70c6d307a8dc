"""Loaders with samplers and batch samplers of the user's, dealt to ranks."""

import random
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from booster_core.errors import CheckpointError, ConfigError
from booster_runtime.data.shard import split_dataloader


class DrawsFromAllGenerators(Sampler):
    """Draws from Python's, numpy's and torch's global generators."""

    def __len__(self):
        return 30

    def __iter__(self):
        order = list(range(30))
        random.shuffle(order)
        for index in np.random.permutation(30):  # noqa: NPY002 - the global generator is meant
            yield (order[index] + int(torch.randint(30, ()))) % 30


class LengthBuckets(Sampler):
    """Makes batches of unequal sizes, and goes on with the list that it has yielded."""

    def __iter__(self):
        batch = []
        for index in torch.randperm(23).tolist():
            batch.append(index)
            if len(batch) > index % 4:
                yield batch
                batch.clear()
        if batch:
            yield batch


class Endless(Sampler):
    def __iter__(self):
        while True:
            yield int(torch.randint(20, ()))


class RemembersItsPasses(Sampler):
    """Has random numbers of its own, which can not be set back."""

    def __init__(self, seed=4):
        self.random = random.Random(seed)

    def __len__(self):
        return 20

    def __iter__(self):
        return iter(self.random.sample(range(20), 20))


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler([1.0, 5.0] * 12, 30),
    "replacement": lambda: RandomSampler(range(24), replacement=True),
    "num_samples": lambda: RandomSampler(range(24), num_samples=50),
    "subset": lambda: SubsetRandomSampler(range(3, 20)),
    "own": DrawsFromAllGenerators,
    "list": lambda: [5, 3, 1, 4, 2, 0, 9],
    "seeded": lambda: WeightedRandomSampler([1.0, 5.0] * 12, 30, generator=torch.Generator().manual_seed(3)),
    "remembers": RemembersItsPasses,
}


def loaders(world_size, make_sampler, batch_size=4, **options):
    return [
        split_dataloader(
            DataLoader(range(50), batch_size=batch_size, sampler=make_sampler(), **options),
            rank=rank,
            world_size=world_size,
            seed=6,
        )
        for rank in range(world_size)
    ]


def in_turn(parts):
    """Return the global order of what ranks saw."""
    return [sample for turn in zip(*parts, strict=True) for sample in turn]


def taken(loader, num_batches=10**6):
    samples = []
    for number, batch in enumerate(loader, start=1):
        samples += batch.tolist()
        if number == num_batches:
            break
    return samples


@pytest.mark.parametrize(("kind", "num_workers"), [*((kind, 0) for kind in SAMPLERS), ("weighted", 2), ("own", 2)])
def test_ranks_are_dealt_one_order_whatever_they_drew_before(kind, num_workers):
    with torch.random.fork_rng(devices=[]):
        (alone,) = loaders(1, SAMPLERS[kind])
        epochs = [taken(alone) for _ in range(2)]
        assert len(set(map(tuple, epochs))) == (1 if kind == "list" else 2)
        for world_size in (2, 3):
            parts = []
            for rank, loader in enumerate(loaders(world_size, SAMPLERS[kind], num_workers=num_workers)):
                torch.manual_seed(rank)
                np.random.seed(rank)  # noqa: NPY002 - as above
                random.seed(rank)
                parts.append([taken(loader) for _ in range(2)])
            for epoch, expected in enumerate(epochs):
                dealt = in_turn([part[epoch] for part in parts])
                num_filled = -len(expected) % world_size
                assert dealt == expected + expected[:num_filled]


def test_drawing_an_order_leaves_the_runs_random_numbers_alone():
    get_numpys = np.random.get_state
    states = torch.get_rng_state(), get_numpys(), random.getstate()
    (loader,) = loaders(1, DrawsFromAllGenerators, num_workers=0)
    next(iter(loader.sampler))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[2]
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(get_numpys(), states[1], strict=True))


@pytest.mark.parametrize("kind", ["weighted", "own", "seeded", "subset"])
@pytest.mark.parametrize("steps", [2, 3])
def test_an_order_is_resumed_with_another_number_of_ranks(kind, steps):
    (alone,) = loaders(1, SAMPLERS[kind], batch_size=2)
    expected = [taken(alone) for _ in range(3)]
    two = loaders(2, SAMPLERS[kind], batch_size=2)
    for loader in two:
        taken(loader)
    first = in_turn([taken(loader, steps) for loader in two])
    states = [loader.state_dict() for loader in two]
    assert states[0] == states[1]
    three = loaders(3, SAMPLERS[kind], batch_size=2)
    for loader in three:
        loader.load_state_dict(states[0])
    rest = in_turn([taken(loader) for loader in three])
    num_filled = -(len(expected[1]) - len(first)) % 3
    assert first + rest == expected[1] + expected[1][:num_filled]
    following = in_turn([taken(loader) for loader in three])
    assert following[: len(expected[2])] == expected[2]


SAVED = {
    "weighted": ("87d181c4565d2c445ae028d9f220aac6", 24, [3, 7, 9, 11, 8, 9]),
    "own": ("4bc0583e45477654d929088f6ff49bb8", 12, [28, 1, 3, 24, 7, 10, 26, 7, 24, 20, 5, 12, 28, 8, 16, 7, 7, 18]),
}
"""Digests and positions that an earlier version saved in epoch 3, and the samples that it went on with."""


@pytest.mark.parametrize("kind", SAVED)
def test_a_position_that_an_earlier_version_saved_is_resumed(kind):
    digest, position, following = SAVED[kind]
    (loader,) = loaders(1, SAMPLERS[kind])
    loader.load_state_dict({"epoch": 3, "num_samples": 30, "order": digest, "position": position, "seed": 6})
    assert taken(loader) == following


def test_a_position_in_an_order_that_is_not_drawn_again_is_refused():
    (loader,) = loaders(1, RemembersItsPasses)
    taken(loader)
    between = loader.state_dict()
    taken(loader, 2)
    inside = loader.state_dict()
    (resumed,) = loaders(1, RemembersItsPasses)
    resumed.load_state_dict(between)
    assert sorted(taken(resumed)) == list(range(20))
    (resumed,) = loaders(1, RemembersItsPasses)
    with pytest.raises(CheckpointError, match=r"draws another order .*which of epoch 1's samples"):
        resumed.load_state_dict(inside)
    plain = split_dataloader(DataLoader(range(20), batch_size=4), rank=0, world_size=1, seed=6)
    with pytest.raises(CheckpointError, match="draws another order"):
        plain.load_state_dict(inside)


def test_what_was_drawn_for_the_digest_is_what_is_dealt():
    """Ranks compare a digest before the first pass, and a sampler with a memory can't be asked twice."""
    (asked, other), (unasked, _) = loaders(2, RemembersItsPasses), loaders(2, RemembersItsPasses)
    assert asked.order_digest() == other.order_digest()
    assert taken(asked) == taken(unasked)
    apart = loaders(1, lambda: RemembersItsPasses(5))[0]
    assert apart.order_digest() != asked.order_digest()


def test_a_generator_that_is_seeded_before_each_epoch_decides_on_it():
    generator = torch.Generator()
    plain = DataLoader(range(20), batch_size=4, shuffle=True, generator=generator)
    loader = split_dataloader(plain, rank=0, world_size=2, seed=0)
    loader.order_digest()
    passes = []
    for seed in (5, 6, 5):
        generator.manual_seed(seed)
        passes.append(taken(loader))
    assert passes[0] == passes[2] != passes[1]


def test_an_endless_sampler_is_dealt():
    two = loaders(2, Endless)
    (alone,) = loaders(1, Endless)
    assert two[0].order_digest() == two[1].order_digest()
    parts = [taken(loader, 400) for loader in two]
    order = in_turn(parts)
    assert order == taken(alone, 800)
    assert order[:1024] != order[1024:2048], "random numbers go on from block to block"
    with pytest.raises(TypeError):
        len(two[0])


def batches_of(world_size, batch_sampler, **options):
    ranks = []
    for rank in range(world_size):
        plain = DataLoader(range(50), batch_sampler=batch_sampler(), **options)
        loader = split_dataloader(plain, rank=rank, world_size=world_size, seed=6)
        ranks.append(loader)
    return ranks


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_batches_of_a_batch_sampler_are_dealt_whole(world_size, num_workers):
    (alone,) = batches_of(1, LengthBuckets)
    for _ in range(2):
        expected = [batch.tolist() for batch in alone]
    assert sorted(chain.from_iterable(expected)) == list(range(23))
    parts = []
    for loader in batches_of(world_size, LengthBuckets, num_workers=num_workers):
        for _ in range(2):
            part = [batch.tolist() for batch in loader]
        parts.append(part)
    num_filled = -len(expected) % world_size
    assert in_turn(parts) == expected + expected[:num_filled]


def test_batches_are_resumed_with_another_number_of_ranks():
    (alone,) = batches_of(1, LengthBuckets)
    expected = [batch.tolist() for batch in alone]
    two = batches_of(2, LengthBuckets)
    iterators = [iter(loader) for loader in two]
    first = [next(iterator).tolist() for _ in range(2) for iterator in iterators]
    (resumed,) = batches_of(1, LengthBuckets)
    resumed.load_state_dict(two[1].state_dict())
    assert first + [batch.tolist() for batch in resumed] == expected


def test_a_sampler_of_batches_without_automatic_batching_is_dealt():
    def make(rank, world_size):
        plain = DataLoader(
            torch.arange(50), batch_size=None, sampler=BatchSampler(SequentialSampler(range(50)), 10, drop_last=False)
        )
        return split_dataloader(plain, rank=rank, world_size=world_size, seed=0)

    parts = [[batch.tolist() for batch in make(rank, 2)] for rank in range(2)]
    assert [batch[0] for batch in in_turn(parts)] == [0, 10, 20, 30, 40, 0]
    assert make(1, 2).without_padding(torch.ones(10)).tolist() == [1.0] * 10


def test_samplers_that_know_of_ranks_are_left_alone():
    sampler = BatchSampler(DistributedSampler(range(8), 2, 0), 2, drop_last=False)
    loader = DataLoader(range(8), batch_sampler=sampler)
    assert split_dataloader(loader, rank=0, world_size=2, seed=0) is loader


def test_a_loader_that_does_not_keep_its_order_is_refused():
    unordered = DataLoader(range(8), in_order=False)
    with pytest.raises(ConfigError, match="`in_order=False`"):
        split_dataloader(unordered, rank=0, world_size=2, seed=0)


class BatchesOfItsOwn(IterableDataset):
    def __iter__(self):
        for first in range(0, 15, 3):
            yield torch.arange(first, first + 3)


def test_an_iterable_data_set_that_makes_batches_is_dealt_by_batches():
    plain = DataLoader(BatchesOfItsOwn(), batch_size=None)
    ranks = [split_dataloader(plain, rank=rank, world_size=2, seed=0) for rank in range(2)]
    parts = [[(batch.tolist(), loader.without_padding(batch).tolist()) for batch in loader] for loader in ranks]
    firsts = [batch[0] for batch, _ in in_turn(parts)]
    assert firsts == [0, 3, 6, 9, 12, 12]
    assert [sample for _, real in in_turn(parts) for sample in real] == list(range(15))
