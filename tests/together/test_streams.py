"""Streams that are read by shards: each sample once, and a run goes on with other numbers of ranks and workers."""

import itertools

import pytest
import torch
from isolated_libraries import FOLDER, missing_libraries, use_isolated_libraries
from log_records import Records
from matrix import matrix
from ranked import on_ranks, raises_on_ranks
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from booster_core import Booster
from booster_core.errors import CheckpointError, ConfigError
from booster_core.ranks import DistCoordinator
from booster_ddp import TorchDDPPlugin
from booster_hybrid import HybridParallelPlugin
from booster_testing import expect_on_ranks, run_on_ranks

pytestmark = pytest.mark.usefixtures("ranks_with_isolated_libraries")


class Shards(IterableDataset):
    """Numbers in shards, which counts how many it has read; tells its position if it is asked for that."""

    def __init__(self, lengths, *, tells=True):
        self.lengths, self.tells = lengths, tells
        self.num_shards = len(lengths)
        self.first, self.at, self.num_read, self.epoch = 0, 0, 0, 0
        if not tells:
            self.state_dict = None

    def shard(self, num_shards, index):
        assert num_shards == self.num_shards
        part = Shards([self.lengths[index]], tells=self.tells)
        part.first = 100 * index
        return part

    def set_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

    def __iter__(self):
        assert get_worker_info() is None, "it would split itself once more"
        for number in range(self.at, self.lengths[0]):
            self.at, self.num_read = number + 1, self.num_read + 1
            yield torch.tensor(self.first + number + 10_000 * self.epoch)
        self.at = 0


def entries(shards):
    for index, length in shards:
        yield from ({"number": 1 + number} for number in (-1, *range(100 * index, 100 * index + length)))


def of_datasets(lengths):
    """Return the same numbers as a stream of the library datasets, which it computes and chooses."""
    use_isolated_libraries()
    import datasets

    stream = datasets.IterableDataset.from_generator(entries, gen_kwargs={"shards": list(enumerate(lengths))})
    return stream.map(lambda entry: {"number": entry["number"] - 1}).filter(lambda entry: entry["number"] >= 0)


KINDS = {
    "own": Shards,
    "without positions": lambda lengths: Shards(lengths, tells=False),
    "datasets": of_datasets,
}
with_datasets = pytest.mark.skipif(
    bool(missing_libraries(["datasets"])), reason=f"datasets not installed, nor in {FOLDER}"
)
EACH_KIND = ["own", "without positions", pytest.param("datasets", marks=with_datasets)]


def loader_of(kind, lengths, **options):
    booster = Booster("cpu", plugin=TorchDDPPlugin())
    loader = DataLoader(KINDS.get(kind, kind)(lengths), batch_size=2, **options)
    _, _, _, loader, _ = booster.boost(torch.nn.Linear(1, 1), dataloader=loader)
    return booster, loader


def passes(kind, lengths, state=None, counts=(None,), **options):
    """Go on where a state says; return of each pass what counts of some batches, and what they have, and the state."""
    _, loader = loader_of(kind, lengths, **options)
    if state is not None:
        loader.load_state_dict(state)
    found = []
    for count in counts:
        batches = (each["number"] if isinstance(each, dict) else each for each in itertools.islice(loader, count))
        found.append([(loader.without_padding(each).tolist(), each.tolist()) for each in batches])
    current = getattr(loader.dataset, "_current", None)
    return found, loader.state_dict(), current[1].num_read if kind == "own" and current else None


def numbers_of(results, number=0):
    """Return what counts in a pass on all ranks, in order."""
    return sorted(each for found, *_ in results for counted, _ in found[number] for each in counted)


def everything(lengths, epoch=0):
    return [10_000 * epoch + 100 * index + number for index, length in enumerate(lengths) for number in range(length)]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", EACH_KIND)
def test_each_sample_comes_once_and_ranks_have_equally_many_batches(kind, num_workers):
    lengths = [5, 3, 4, 8, 1]
    results = run_on_ranks(passes, 2, kind, lengths, None, (None, None), num_workers=num_workers)
    assert len({len(found[0]) for found, *_ in results}) == 1
    assert numbers_of(results) == everything(lengths)
    second = {each for found, *_ in results for _, batch in found[1] for each in batch}
    assert second == {*everything(lengths, epoch=0 if kind == "datasets" else 1)}


def test_all_end_with_the_first_where_the_rest_is_dropped():
    results = run_on_ranks(passes, 2, "own", [5, 3, 5, 9], drop_last=True)
    assert [len(found[0]) for found, *_ in results] == [5, 5]
    numbers = numbers_of(results)
    assert len(numbers) == len(set(numbers)) == 20


@matrix(2, kind=EACH_KIND, workers=[(0, 0), (2, 0), (0, 2)], ranks=[(2, 1), (1, 3), (3, 2)])
def test_a_position_is_restored_with_other_ranks_and_workers(kind, workers, ranks):
    lengths = [5, 3, 4, 8]
    first = run_on_ranks(passes, ranks[0], kind, lengths, None, (2,), num_workers=workers[0])
    states = [state for _, state, _ in first]
    assert all(state == states[0] for state in states)
    rest = run_on_ranks(passes, ranks[1], kind, lengths, states[0], num_workers=workers[1])
    assert numbers_of([*first, *rest]) == everything(lengths)


def state_after(lengths, num_batches):
    """Return where a process is that has read some batches alone."""
    return run_on_ranks(passes, 1, "own", lengths, None, (num_batches,))[0][1]


def test_what_was_read_is_not_read_again():
    results = run_on_ranks(passes, 1, "own", [50], state_after([50], 20), (2,))
    assert numbers_of(results) == [40, 41, 42, 43]
    assert results[0][2] == 4


def test_a_pass_that_goes_on_where_a_rank_had_ended_ends_where_the_rest_is_dropped():
    state = state_after([2, 8], 2)
    results = run_on_ranks(passes, 2, "own", [2, 8], state, (None, None), drop_last=True)
    assert [found[0] for found, *_ in results] == [[], []]
    assert [[batch for _, batch in found[1]] for found, *_ in results] == [[[10_000, 10_001]], [[10_100, 10_101]]]


def test_the_pass_after_one_that_was_left_begins_at_the_start():
    results = run_on_ranks(passes, 1, "own", [6, 5], state_after([6, 5], 2), (1, None))
    assert numbers_of(results) == [4, 5]
    assert numbers_of(results, 1) == everything([6, 5], epoch=1)


@on_ranks(2)
def test_checkpoints_have_the_position(tmp_path):
    booster, loader = loader_of("own", [6, 6])
    model, *_ = booster.boost(torch.nn.Linear(1, 1))
    batches, own = iter(loader), 100 * DistCoordinator().rank
    assert next(batches).tolist() == [own, own + 1]
    booster.save_checkpoint(tmp_path, step=1, model=model, dataloader=loader)
    rest = [[own + 2, own + 3], [own + 4, own + 5]]
    assert [batch.tolist() for batch in batches] == rest
    booster, loader = loader_of("own", [6, 6])
    model, *_ = booster.boost(torch.nn.Linear(1, 1))
    booster.load_checkpoint(tmp_path, model=model, dataloader=loader)
    assert [batch.tolist() for batch in loader] == rest


@pytest.mark.parametrize(
    ("lengths", "steps"),
    [
        ([2, 6], [[0, 1, 100, 101], [102, 103], [104, 105]]),
        ([0, 4], [[100, 101], [102, 103]]),
        ([0, 4, 4, 0], [[100, 101, 200, 201], [102, 103, 202, 203]]),
    ],
)
@on_ranks(lambda lengths: len(lengths))  # noqa: PLW0108 - the parameter is named
def test_ranks_whose_shards_have_ended_leave_the_gradients_as_those_of_one_process(lengths, steps):
    def gradients(batches=None):
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if batches is None:
            loader = DataLoader(Shards(lengths), batch_size=2)
            booster = Booster("cpu", plugin=TorchDDPPlugin())
            model, optimizer, _, batches, _ = booster.boost(model, optimizer, dataloader=loader)
        for batch in batches:
            model(batch.double()[:, None] / 100).square().mean().backward()
            yield [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()

    expected = gradients(map(torch.tensor, steps))
    torch.testing.assert_close([*gradients()], [*expected], rtol=1e-12, atol=0)


def test_ranks_take_turns_to_lend_their_batches():
    results = run_on_ranks(passes, 3, "own", [0, 4, 4], None, (None, None))
    assert [batch for _, batch in results[0][0][1]] == [[10_100, 10_101], [10_202, 10_203]]


def split_tensors(lengths):
    loader = Booster("cpu", plugin=HybridParallelPlugin(tp_size=2)).prepare_dataloader(Shards(lengths), 2)
    return [(batch.tolist(), loader.without_padding(batch).tolist()) for batch in loader]


def test_ranks_that_share_samples_have_the_same():
    assert run_on_ranks(split_tensors, 2, [4]) == [[([0, 1], [0, 1]), ([2, 3], [2, 3])]] * 2
    ended, others = [([100, 101], []), ([102], [])], [([100, 101], [100, 101]), ([102], [102])]
    assert run_on_ranks(split_tensors, 4, [0, 3]) == [ended, ended, others, others]


def test_fewer_shards_than_ranks_are_read_by_all():
    assert numbers_of(run_on_ranks(passes, 2, "own", [7])) == list(range(7))


@on_ranks(2)
def test_what_one_rank_meets_is_raised_on_all():
    class Broken(Shards):
        def shard(self, num_shards, index):
            return self if index == 1 else super().shard(num_shards, index)

        def __iter__(self):
            msg = "the file is damaged"
            raise OSError(msg)

    with pytest.raises(OSError, match="the file is damaged"):
        passes(Broken, [3, 3])
    with pytest.raises(ConfigError, match="no batch at all"):
        passes("own", [3, 0], drop_last=True)
    with pytest.raises(ConfigError, match="can't be pickled"):
        passes("own", [3, 0], collate_fn=lambda samples: [lambda: samples])


def test_positions_that_do_not_fit_are_refused():
    state = state_after([5, 5], 1)
    expect_on_ranks(CheckpointError, "2 shards; this one has 3", passes, 1, "own", [5, 5, 5], state)
    expect_on_ranks(CheckpointError, "fewer shards", passes, 3, "own", [5, 5], state)
    persistent = {"num_workers": 1, "persistent_workers": True}
    expect_on_ranks(CheckpointError, "Persistent workers", passes, 1, "own", [5, 5], state, **persistent)
    del state["shards"]
    expect_on_ranks(CheckpointError, "not read by shards", passes, 1, "own", [5, 5], state)


@with_datasets
@raises_on_ranks(ConfigError, "split_dataset_by_node", 2)
def test_a_stream_that_was_split_by_node_is_refused():
    stream = of_datasets([4, 4])
    import datasets.distributed

    coordinator = DistCoordinator()
    own = datasets.distributed.split_dataset_by_node(stream, coordinator.rank, coordinator.world_size)
    Booster("cpu", plugin=TorchDDPPlugin()).boost(torch.nn.Linear(1, 1), dataloader=DataLoader(own, batch_size=2))


def lonely():
    _, loader = loader_of("own", [4, 4])
    if DistCoordinator().rank == 0:
        next(iter(loader))


def test_a_rank_that_reads_alone_is_named():
    from booster_core.errors import MissingRanksError

    with pytest.raises(Exception, match="next batch of a stream") as caught:
        run_on_ranks(lonely, 2, group_timeout_seconds=2)
    assert MissingRanksError.__name__ in str(caught.value)


class InTurn(IterableDataset):
    """Numbers of which each rank takes its turn's, unless the data set takes a rank's share by itself."""

    def __init__(self, *, splits_itself, kind):
        self.splits_itself, self.kind = splits_itself, kind

    def __iter__(self):
        first = DistCoordinator().rank if self.splits_itself else 0
        yield from (self.kind(number) for number in range(first, 24, 2 if self.splits_itself else 1))


@pytest.mark.parametrize(("kind", "num_workers"), [(torch.tensor, 0), (str, 1)])
@on_ranks(2)
def test_a_stream_that_splits_itself_is_told_once_on_rank_0(kind, num_workers):
    for splits_itself in (False, True):
        with Records() as records:
            booster = Booster("cpu", plugin=TorchDDPPlugin())
            model = torch.nn.Linear(1, 1)
            data = InTurn(splits_itself=splits_itself, kind=kind)
            loader = DataLoader(data, batch_size=2, num_workers=num_workers)
            _, _, _, loader, _ = booster.boost(model, torch.optim.SGD(model.parameters()), dataloader=loader)
            for _ in range(2):
                for _ in loader:
                    DistCoordinator().block_all()
        said = [text for text in records.texts if "begin with different samples" in text]
        assert len(said) == (1 if splits_itself and DistCoordinator().is_master() else 0)
        assert all("one of every 2 of its own" in text for text in said)
