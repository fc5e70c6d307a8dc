import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info

from booster_core.errors import CheckpointError, ConfigError
from booster_runtime.data.loader import DistributedDataLoader
from booster_runtime.data.order import ShardedSampler
from booster_runtime.data.prepare import prepare_dataloader
from booster_runtime.data.shard import split_dataloader


class Numbers(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


class Sized(Numbers):
    def __len__(self):
        return self.count


class WorkerSeeds(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        assert get_worker_info() is not None
        return torch.initial_seed() % 2**31, int(torch.randint(10**6, ()))


def loaders(dataset, batch_size, world_size, **options):
    return [
        prepare_dataloader(dataset, batch_size, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]


def seen(loader):
    return [int(sample) for batch in loader for sample in batch]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num_samples", [12, 13, 2500])  # the last are drawn block by block
def test_samples_are_those_of_torchs_sampler(world_size, shuffle, num_samples):
    for rank in range(world_size):
        for drop_last in (False, True):
            ours = ShardedSampler(
                num_samples, rank=rank, world_size=world_size, shuffle=shuffle, seed=5, drop_last=drop_last
            )
            theirs = DistributedSampler(
                range(num_samples), world_size, rank, shuffle=shuffle, seed=5, drop_last=drop_last
            )
            for epoch in (0, 3):
                ours.set_epoch(epoch)
                theirs.set_epoch(epoch)
                assert list(ours) == list(theirs)
            assert len(ours) == len(theirs)


@pytest.mark.parametrize("sampler", [None, range(2499, -1, -1)])
@pytest.mark.parametrize("start", [1023, 1500, 2499])
def test_a_position_behind_the_first_block_is_resumed(sampler, start):
    whole = list(range(2500)) if sampler is None else list(sampler)
    parts = []
    for rank in range(3):
        loader = split_dataloader(DataLoader(range(2500), sampler=sampler), rank=rank, world_size=3, seed=1)
        state = loader.state_dict() | {"position": start, "order": loader.order_digest()}
        loader.load_state_dict(state)
        parts.append(seen(loader))
    rest = [sample for turn in zip(*parts, strict=True) for sample in turn]
    assert rest == whole[start:] + whole[: -(2500 - start) % 3]


@given(
    num_samples=st.integers(8, 60),
    batch=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    steps=st.integers(0, 6),
    shuffle=st.booleans(),
)
def test_a_run_resumed_with_other_numbers_of_ranks_sees_each_sample_once(num_samples, batch, sizes, steps, shuffle):
    """Ranks come and go after some steps each; with `drop_last` no sample is seen twice, and few are left out."""
    state, samples = None, []
    for number, world_size in enumerate(sizes):
        is_last = number == len(sizes) - 1
        ranks = loaders(range(num_samples), batch, world_size, shuffle=shuffle, seed=3, drop_last=True)
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
        iterators = [iter(loader) for loader in ranks]
        taken = 0
        while is_last or taken < steps:
            batches = [next(iterator, None) for iterator in iterators]
            if batches[0] is None:
                assert all(rest is None for rest in batches), "ranks make equally many steps"
                break
            samples += [int(sample) for each in batches for sample in each]
            taken += 1
        states = [loader.state_dict() for loader in ranks]
        assert all(each == states[0] for each in states), "the position is the same on every rank"
        state = states[0]
        if state["epoch"]:
            break
    assert len(set(samples)) == len(samples), "no sample twice"
    assert set(samples) <= set(range(num_samples))
    assert num_samples - len(samples) < batch * sizes[number], "only what can't fill a step is left out"


def test_position_counts_what_was_handed_out_not_what_was_prefetched():
    (loader,) = loaders(list(range(40)), 4, 1, num_workers=2, prefetch_factor=4)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    assert loader.state_dict()["position"] == 12
    del iterator
    (resumed,) = loaders(list(range(40)), 4, 1)
    resumed.load_state_dict(loader.state_dict())
    assert seen(resumed) == list(range(12, 40))
    assert resumed.state_dict()["position"] == 0
    assert resumed.epoch == 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_iterable_data_sets_are_dealt_out(num_workers):
    parts = [seen(loader) for loader in loaders(Numbers(11), 2, 2, num_workers=num_workers)]
    assert parts == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 10]]
    parts = [seen(loader) for loader in loaders(Numbers(11), 2, 2, num_workers=num_workers, drop_last=True)]
    assert parts == [[0, 2, 4, 6], [1, 3, 5, 7]], "the end fills no batch of each rank"


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("count", [11, 12, 13])
def test_the_length_of_a_loader_over_a_sized_stream_is_its_number_of_batches(count, drop_last, num_workers):
    options = {"drop_last": drop_last, "num_workers": num_workers}
    plain = DataLoader(Sized(count), batch_size=3, **options)
    share = count // 2 if drop_last else -(-count // 2)
    expected = share // 3 if drop_last else -(-share // 3)
    for loader in (*loaders(Sized(count), 3, 2, **options), split_dataloader(plain, rank=1, world_size=2, seed=0)):
        assert (len(loader), sum(1 for _ in loader), len(loader)) == (expected,) * 3


def test_the_length_of_a_loader_of_single_items_is_that_of_a_share():
    loader = split_dataloader(DataLoader(Sized(13), batch_size=None), rank=0, world_size=2, seed=0)
    assert len(loader) == sum(1 for _ in loader) == 7


def test_an_iterable_data_set_resumes_with_another_number_of_ranks():
    two = loaders(Numbers(24), 2, 2)
    iterators = [iter(loader) for loader in two]
    first = [int(sample) for iterator in iterators for sample in next(iterator)]
    three = loaders(Numbers(24), 2, 3)
    for loader in three:
        loader.load_state_dict(two[0].state_dict())
    rest = [sample for loader in three for sample in seen(loader)]
    assert sorted(first + rest) == [*range(24), 23], "20 are left, and one is repeated to make seven rounds of three"
    assert all(seen(loader)[0] == rank for rank, loader in enumerate(three)), "the next epoch starts at the start"


def test_workers_are_seeded_apart_and_alike_in_every_run():
    def seeds(rank, epoch):
        loader = prepare_dataloader(WorkerSeeds(), 1, rank=rank, world_size=2, num_workers=2, seed=7)
        loader.set_epoch(epoch)
        return [tuple(map(int, batch)) for batch in loader]

    assert seeds(0, 0) == seeds(0, 0)
    assert not set(seeds(0, 0)) & set(seeds(1, 0))
    assert not set(seeds(0, 0)) & set(seeds(0, 1))
    assert len({seed for seed, _ in seeds(0, 0)}) == 2, "each worker has its own"


@pytest.mark.parametrize("seed", [2**31 - 1, 67280421310721, 2**63 - 1, 2**64 - 1, -1, -(2**63)])
def test_any_seed_that_torch_takes_orders_samples_and_seeds_workers(seed):
    """Rank 0's part and rank 1's are one order, another in the next epoch; workers are seeded from it, too."""
    orders = []
    for epoch in (0, 1):
        ranks = loaders(range(40), 4, 2, shuffle=True, seed=seed)
        for loader in ranks:
            loader.set_epoch(epoch)
        parts = [seen(loader) for loader in ranks]
        assert sorted(parts[0] + parts[1]) == list(range(40))
        orders.append(parts)
        assert ranks[0].generator.initial_seed() != ranks[1].generator.initial_seed()
    assert orders[0] != orders[1]


@pytest.mark.parametrize("seed", [1.5, "7", None])
def test_a_seed_that_is_no_integer_is_refused(seed):
    with pytest.raises(TypeError, match="`seed` is an integer"):
        prepare_dataloader(range(8), 2, seed=seed, rank=0, world_size=2)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_plain_loader_is_split_and_keeps_its_settings(shuffle):
    def collate(samples):
        return torch.tensor(samples) * 10

    plain = DataLoader(list(range(12)), batch_size=2, shuffle=shuffle, collate_fn=collate, drop_last=True)
    parts = [split_dataloader(plain, rank=rank, world_size=3, seed=1) for rank in range(3)]
    assert all(isinstance(part, DistributedDataLoader) and part.drop_last for part in parts)
    assert sorted(sample for part in parts for sample in seen(part)) == list(range(0, 120, 10))
    assert split_dataloader(parts[0], rank=0, world_size=3, seed=1) is parts[0]


class Reversed(torch.utils.data.Sampler):
    def __init__(self, dataset, num_replicas, rank, shuffle):
        self.indices = list(range(len(dataset)))[rank::num_replicas][::-1]

    def __iter__(self):
        return iter(self.indices)

    def __len__(self):
        return len(self.indices)


def test_a_sampler_class_of_the_users():
    (_, loader) = loaders(range(8), 2, 2, distributed_sampler_cls=Reversed)
    assert seen(loader) == [7, 5, 3, 1]
    with pytest.raises(CheckpointError, match="its sampler is a `Reversed`"):
        loader.state_dict()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": -3}, "batch_size=-3"),
        ({"sampler": [1, 2]}, "`sampler` can't be passed"),
        ({"world_size": 9}, "has 8 samples, fewer than the 9 ranks"),
    ],
)
def test_bad_arguments_are_refused(arguments, match):
    with pytest.raises(ConfigError, match=match):
        prepare_dataloader(range(8), **{"rank": 0, "world_size": 2, **arguments})


def test_an_iterable_data_set_can_not_be_shuffled():
    with pytest.raises(ConfigError, match="no order to shuffle"):
        prepare_dataloader(Numbers(4), 1, shuffle=True, rank=0, world_size=1)


def test_a_position_of_another_data_set_is_refused():
    (loader,), (other,) = loaders(range(8), 2, 1), loaders(range(9), 2, 1)
    with pytest.raises(CheckpointError, match="data set of 8 samples; this one has 9"):
        other.load_state_dict(loader.state_dict())


def test_a_position_can_not_be_restored_into_interleaved_streams():
    (loader,) = loaders(Numbers(8), 2, 1, num_workers=2)
    with pytest.raises(CheckpointError, match="num_workers=2"):
        loader.load_state_dict({"epoch": 0, "position": 4, "num_samples": None, "seed": 0})
