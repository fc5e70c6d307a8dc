"""Which epoch's order a pass over a loader follows, also where passes are left early."""

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from booster_core.errors import ConfigError
from booster_runtime.data.prepare import prepare_dataloader
from booster_runtime.data.shard import split_dataloader

SAMPLES = 24


def order_of(epoch, rank=0, world_size=2):
    """Return torch's own order of an epoch."""
    sampler = DistributedSampler(range(SAMPLES), world_size, rank, shuffle=True, seed=3)
    sampler.set_epoch(epoch)
    return list(sampler)


def make(rank=0, **options):
    return prepare_dataloader(range(SAMPLES), 4, shuffle=True, seed=3, rank=rank, world_size=2, **options)


def some(loader, num_batches):
    """Take some batches, and leave the loop."""
    samples = []
    for number, batch in enumerate(loader, start=1):
        samples += batch.tolist()
        if number == num_batches:
            break
    return samples


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_leaving_an_epoch_early_starts_the_next_one(rank, num_workers):
    loader = make(rank, num_workers=num_workers)
    for epoch in range(3):
        assert some(loader, 2) == order_of(epoch, rank)[:8]
        assert loader.epoch == epoch
    assert some(loader, 99) == order_of(3, rank)
    assert loader.epoch == 4


def test_an_iterator_that_nothing_was_taken_of_begins_no_epoch():
    loader = make()
    iter(loader)
    iter(loader)
    assert some(loader, 3) == order_of(0)


@pytest.mark.parametrize("on_sampler", [False, True])
def test_the_epoch_that_the_user_sets_wins(on_sampler):
    loader = make()
    target = loader.sampler if on_sampler else loader
    for epoch in (0, 0, 5, 5, 1):
        target.set_epoch(epoch)
        assert some(loader, 1) == order_of(epoch)[:4]


def test_a_position_inside_of_an_epoch_belongs_to_that_epoch():
    loader = make()
    some(loader, 99)
    some(loader, 2)
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (1, 16)
    resumed = make()
    some(resumed, 1)
    resumed.load_state_dict(state)
    assert some(resumed, 99) == order_of(1)[8:]
    assert some(resumed, 1) == order_of(2)[:4]
    resumed.load_state_dict(state)
    assert some(resumed, 1) == order_of(1)[8:12]
    assert some(resumed, 1) == order_of(2)[:4], "the resumed epoch was left early"


def test_a_sampler_class_of_the_users_keeps_the_epoch_that_was_set_on_it():
    loader = make(distributed_sampler_cls=DistributedSampler)
    loader.sampler.seed = 3
    loader.sampler.set_epoch(5)
    assert some(loader, 1) == order_of(5)[:4]
    assert some(loader, 99) == order_of(6)
    assert some(loader, 99) == order_of(7)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_generator_of_the_users_decides_on_the_order(world_size):
    """The ranks' samples together are, epoch by epoch, what torch's own loader yields."""

    def plain():
        generator = torch.Generator().manual_seed(11)
        return DataLoader(range(SAMPLES), batch_size=4, shuffle=True, generator=generator)

    expected = plain()
    loaders = [split_dataloader(plain(), rank=rank, world_size=world_size, seed=rank) for rank in range(world_size)]
    state = None
    for epoch in range(3):
        alone = [sample for batch in expected for sample in batch.tolist()]
        parts = [[sample for batch in loader for sample in batch.tolist()] for loader in loaders]
        assert [sample for turn in zip(*parts, strict=True) for sample in turn] == alone
        if epoch == 1:
            state = loaders[0].state_dict()
    (resumed,) = [split_dataloader(plain(), rank=0, world_size=world_size, seed=0)]
    resumed.load_state_dict(state)
    assert [sample for batch in resumed for sample in batch.tolist()] == alone[::world_size]


def test_a_generator_that_would_not_decide_on_the_order_is_refused():
    generator = torch.Generator().manual_seed(11)
    place = {"rank": 0, "world_size": 2, "batch_size": 4}
    with pytest.raises(ConfigError, match="`generator` of `prepare_dataloader` would not decide on the order"):
        prepare_dataloader(range(SAMPLES), shuffle=True, generator=generator, **place)
    in_order = prepare_dataloader(range(SAMPLES), generator=generator, **place)
    assert next(iter(in_order)).tolist() == [0, 2, 4, 6]
