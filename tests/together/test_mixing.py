"""Mixed streams: as often as their weights say, each sample in its order, and gone on with exactly."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from booster_core import Booster
from booster_core.errors import CheckpointError, ConfigError
from booster_ddp import TorchDDPPlugin
from booster_runtime import MixedStreams, PackedDocuments
from booster_testing import run_on_ranks


class Numbers(IterableDataset):
    """Numbers, also of shards, in an order that the epoch says."""

    num_shards = 4

    def __init__(self, first, count, share=(1, 0), *, tells=True):
        self.first, self.count, self.share, self.tells = first, count, share, tells
        self.at = self.loaded = self.epoch = 0
        if not tells:
            self.state_dict = None

    def shard(self, num_shards, index):
        return Numbers(self.first, self.count, (num_shards, index), tells=self.tells)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = self.loaded = state["at"]

    def __iter__(self):
        num_shards, index = self.share
        own = range(self.first + index, self.first + self.count, num_shards)
        start, self.loaded = self.loaded, 0  # a pass that is left early leaves nothing
        for number in range(start, len(own)):
            self.at = number + 1
            yield own[(number + self.epoch) % len(own)]
        self.at = 0


def mixed(*, at_end="stop", tells=True, scale=1):
    """Return a mixture of two streams, and of a data set with a length."""
    sources = [
        (Numbers(0, 600 * scale, tells=tells), 6),
        (Numbers(10_000, 250 * scale), 3),
        (range(20_000, 20_000 + 90 * scale), 1),
    ]
    return MixedStreams(sources, seed=7, at_end=at_end)


def by_source(numbers):
    numbers = list(numbers)
    return [[number for number in numbers if number // 10_000 == source] for source in range(3)]


def test_sources_come_as_often_as_their_weights_say_each_in_its_order():
    first, second, third = by_source(itertools.islice(mixed(scale=10), 5000))
    for found, weight in ((first, 0.6), (second, 0.3), (third, 0.1)):
        assert len(found) == pytest.approx(5000 * weight, rel=0.1)
    assert first == list(range(len(first)))
    assert second == list(range(10_000, 10_000 + len(second)))
    assert len(set(third)) == len(third)
    assert third != sorted(third), "a data set is shuffled"


def test_the_order_is_drawn_by_seed_and_epoch():
    whole, again = mixed(), mixed()
    first = list(whole)
    assert first == list(again) == list(whole)
    whole.set_epoch(1)
    second = list(whole)
    assert second != first
    assert [number // 10_000 for number in second] != [number // 10_000 for number in first[: len(second)]]
    other = MixedStreams([(Numbers(0, 600), 6), (Numbers(10_000, 250), 3)], seed=8)
    assert list(other) != list(MixedStreams([(Numbers(0, 600), 6), (Numbers(10_000, 250), 3)], seed=7))


def test_a_pass_stops_with_the_first_source_or_repeats_until_all_have_ended():
    stopped = by_source(mixed())
    assert any(len(found) == count for found, count in zip(stopped, (600, 250, 90), strict=True))
    repeated = by_source(mixed(at_end="repeat"))
    for found, count in zip(repeated, (600, 250, 90), strict=True):
        assert len(set(found)) == count, "every sample at least once"
    assert any(len(found) > len(set(found)) for found in repeated)
    numbers = [number for found in repeated for number in found if len(found) > len(set(found))]
    assert numbers[:1] != numbers[600:601], "in the order of its next epoch"


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("num_seen", [0, 1, 700, 1023, 1024, 1100])
def test_a_position_is_restored(num_seen, tells):
    def made():
        return mixed(at_end="repeat", tells=tells, scale=2)

    expected = list(made())
    first, second = made(), made()
    reader = iter(first)
    assert [next(reader) for _ in range(num_seen)] == expected[:num_seen]
    for _ in range(2):  # a second time before anything was read, and after one sample
        second.load_state_dict(first.state_dict())
        assert second.state_dict() == first.state_dict()
        again = iter(second)
        assert next(again) == expected[num_seen]
        assert [next(again) for _ in range(3)] == expected[num_seen + 1 :][:3]
        third = made()
        third.load_state_dict(second.state_dict())
        assert list(third) == expected[num_seen + 4 :]
    second.load_state_dict(first.state_dict())
    reader, again = iter(first) if num_seen == 0 else reader, iter(second)
    for further in range(1, 21):  # a source that gave nothing since keeps its position
        assert next(again) == next(reader)
        fourth = made()
        fourth.load_state_dict(second.state_dict())
        assert next(iter(fourth)) == expected[num_seen + further]


def read(num_batches, state, num_workers):
    booster = Booster("cpu", plugin=TorchDDPPlugin())
    plain = DataLoader(mixed(at_end="repeat"), batch_size=5, num_workers=num_workers)
    _, _, _, loader, _ = booster.boost(torch.nn.Linear(1, 1), dataloader=plain)
    if state is not None:
        loader.load_state_dict(state)
    seen = [loader.without_padding(batch).tolist() for batch in itertools.islice(loader, num_batches)]
    return [number for batch in seen for number in batch], loader.state_dict()


@pytest.mark.parametrize(("before", "after", "workers"), [(2, 1, 0), (1, 4, 0), (3, 2, 2)])
def test_any_number_of_ranks_goes_on_exactly(before, after, workers):
    shards = [list(mixed(at_end="repeat").shard(4, index)) for index in range(4)]
    first = run_on_ranks(read, before, 30, None, workers)
    state = first[0][1]
    rest = run_on_ranks(read, after, None, state, 0)
    seen = sorted(number for numbers, _ in (*first, *rest) for number in numbers)
    assert seen == sorted(number for shard in shards for number in shard)


def test_mixtures_are_packed():
    documents = [([[1, 2, 3]] * 50, 0.5), ([[4] * 7] * 50, 0.5)]
    rows = PackedDocuments(MixedStreams(documents, seed=3), 10)
    assert rows.num_shards == 50
    found = torch.cat([row["input_ids"] for row in rows])
    assert 0.5 < float((found == 4).float().mean()) < 0.9


def test_what_can_not_be_mixed_is_refused():
    for sources in ([], [([1], 0.0)], [([1], 1.0), ([2], -1)], [([1], float("nan"))]):
        with pytest.raises(ConfigError, match="Each source has a positive weight"):
            MixedStreams(sources, seed=0)
    with pytest.raises(ConfigError, match=r"`at_end='again'` is no way.*'stop' or 'repeat'"):
        MixedStreams([([1], 1.0)], seed=0, at_end="again")
    with pytest.raises(ConfigError, match=r"Source 1 of the mixture .* has no samples to repeat"):
        list(MixedStreams([(range(9), 1.0), (Numbers(0, 0), 1.0)], seed=0, at_end="repeat"))
    with pytest.raises(CheckpointError, match="saved for a mixture of 3 sources; this one has 1"):
        MixedStreams([([1], 1.0)], seed=0).load_state_dict(mixed().state_dict())
