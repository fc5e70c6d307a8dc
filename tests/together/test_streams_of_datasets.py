"""Streams of the library datasets: read by shards, and restored on other numbers of ranks and workers."""

import pytest
import torch
from isolated_libraries import FOLDER, missing_libraries, use_isolated_libraries
from matrix import matrix
from ranked import raises_on_ranks
from torch.utils.data import DataLoader

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_ddp import TorchDDPPlugin
from booster_testing import run_on_ranks

pytestmark = [
    pytest.mark.usefixtures("ranks_with_isolated_libraries"),
    pytest.mark.skipif(bool(missing_libraries(["datasets"])), reason=f"datasets not installed, nor in {FOLDER}"),
]


def numbers(shards):
    for index, length in shards:
        yield from ({"number": 100 * index + number} for number in range(length))


def stream_of(lengths):
    use_isolated_libraries()
    import datasets

    shards = list(enumerate(lengths))
    stream = datasets.IterableDataset.from_generator(numbers, gen_kwargs={"shards": shards})
    return stream.map(lambda entry: {"number": entry["number"] + 1}).filter(lambda entry: entry["number"] > 1)


def everything(lengths):
    found = [100 * index + number + 1 for index, length in enumerate(lengths) for number in range(length)]
    return [number for number in found if number > 1]


def loader_of(stream, **options):
    booster = Booster("cpu", plugin=TorchDDPPlugin())
    return booster.boost(torch.nn.Linear(1, 1), dataloader=DataLoader(stream, batch_size=2, **options))[3]


def read(lengths, num_batches, num_workers, state=None):
    """Return the numbers of some batches, each of them once, and the position then."""
    loader = loader_of(stream_of(lengths), num_workers=num_workers)
    if state is not None:
        loader.load_state_dict(state)
    found, count = [], 0
    for batch in loader:
        found += loader.without_padding(batch["number"]).tolist()
        count += 1
        if count == num_batches:
            break
    return found, count, loader.state_dict()


@matrix(["2"], num_workers=[0, 2])
def test_each_sample_comes_once_and_ranks_have_equally_many_batches(num_workers):
    lengths = [5, 3, 4, 8, 1]
    results = run_on_ranks(read, 2, lengths, None, num_workers)
    assert len({count for _, count, _ in results}) == 1
    assert sorted(number for found, *_ in results for number in found) == everything(lengths)


@matrix(["ranks2-workers1"], ranks=[(2, 1), (1, 3), (3, 2)], workers=[(0, 0), (2, 0), (0, 2)])
def test_a_position_is_restored_with_other_ranks_and_workers(workers, ranks):
    lengths = [5, 3, 4, 8]
    first = run_on_ranks(read, ranks[0], lengths, 2, workers[0])
    states = [state for *_, state in first]
    assert all(state == states[0] for state in states)
    rest = run_on_ranks(read, ranks[1], lengths, None, workers[1], states[0])
    assert sorted(number for found, *_ in (*first, *rest) for number in found) == everything(lengths)


@raises_on_ranks(ConfigError, "split_dataset_by_node", 2)
def test_a_stream_that_was_split_by_node_is_refused():
    lengths = [4, 4]
    stream = stream_of(lengths)
    import datasets.distributed

    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    loader_of(datasets.distributed.split_dataset_by_node(stream, rank, size))
