"""Ranks that work on one batch together get the same one, or are told that they did not."""

import pytest
import torch
import torch.distributed as dist
from hybrid_runs import RING, ULYSSES, boosted
from matrix import matrix, named
from ranked import on_ranks, raises_on_ranks
from torch.utils.data import DataLoader, DistributedSampler

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_hybrid.same_training import checksum_of
from booster_testing.models import tiny_llama


@matrix(
    ["pp"],
    **{
        "options, replicas": named(
            [
                ({"tp_size": 2}, [(0, 1), (2, 3)]),
                ({"pp_size": 2}, [(0, 1), (2, 3)]),
                (RING, [(0, 1), (2, 3)]),
                ({"tp_size": 2, "pp_size": 2}, [(0, 1, 2, 3)]),
            ],
            ["tp", "pp", "sp", "tp-pp"],
            joint=True,
        )
    },
)
@on_ranks(4)
def test_a_loader_made_before_boost_knows_which_ranks_share_batches(options, replicas):
    booster = Booster(plugin=HybridParallelPlugin(**options))
    loader = booster.prepare_dataloader(range(16), 2, shuffle=True, seed=5)
    seen = [None] * 4
    dist.all_gather_object(seen, [batch.tolist() for batch in loader])
    for ranks in replicas:
        assert all(seen[rank] == seen[ranks[0]] for rank in ranks)
    distinct = [sample for ranks in replicas for batch in seen[ranks[0]] for sample in batch]
    assert sorted(distinct) == list(range(16))


@matrix(
    ["tp", "pp"],
    options=named(
        [{"tp_size": 2}, {"pp_size": 2}, ULYSSES],
        ["tp", "pp", "sp"],
    ),
)
@on_ranks(2)
def test_replicas_given_different_batches_raise(options):
    tokens = torch.randint(64, (32, 8), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    message = r"`num_replicas=2`, but of the ranks that see different samples this is rank 0 of 1\."
    with pytest.raises(ConfigError, match=message):
        Booster(plugin=HybridParallelPlugin(**options)).boost(tiny_llama(), dataloader=loader)
    booster, model, optimizer = boosted(tiny_llama(), **options)

    def train():
        if "pp_size" in options:
            booster.execute_pipeline(iter(loader), model, lambda outputs, _: outputs.loss, optimizer)
        else:
            model(**next(iter(loader)))

    with pytest.raises(ConfigError, match="Ranks 0, 1 work on one batch together, but were given"):
        train()


@matrix(
    1,
    options=named([{"tp_size": 2}, RING], ["tp", "ring"]),
    more=[0, 1],
    has_gradients=[True, False],
)
@raises_on_ranks(ConfigError, "Ranks 0, 1 work on one batch", 2)
def test_each_batch_of_a_loop_is_compared(options, more, has_gradients):
    """Take batches of which the second differs, in its values alone or in its rows as well."""
    booster, model, optimizer = boosted(tiny_llama(), **options)
    for step in range(2):
        rank = dist.get_rank() * step
        tokens = torch.randint(64, (4 + more * rank, 8), generator=torch.Generator().manual_seed(rank))
        with torch.set_grad_enabled(has_gradients):
            loss = model(input_ids=tokens, labels=tokens).loss
        if has_gradients:
            booster.backward(loss, optimizer)
            optimizer.step()


def some_batches(count=1):
    for _ in range(count):
        yield {"input_ids": torch.ones(2, 8, dtype=torch.long), "labels": torch.ones(2, 8, dtype=torch.long)}


def broken_loader():
    yield from some_batches()
    message = "the disk is gone"
    raise OSError(message)


def larger_batches():
    yield from some_batches()
    yield {name: torch.cat([each] * 3) for batch in some_batches() for name, each in batch.items()}


STYLES = {"1f1b": {}, "zbv": {"pp_style": "zbv"}, "sharded": {"zero_stage": 2}, "by size": {"microbatch_size": 1}}


@matrix(
    ["0-end-1f1b", "1-error-zbv", "1-larger-by size"],
    failing=[0, 1],
    **{
        "make, kind, message": named(
            [
                (broken_loader, OSError, "the disk is gone"),
                (some_batches, StopIteration, None),
                (larger_batches, ConfigError, "Ranks 0, 1 work on one batch"),
            ],
            ["error", "end", "larger"],
            joint=True,
        ),
    },
    options=named(STYLES.values(), STYLES),
)
@on_ranks(2)
def test_what_a_batch_lacks_on_any_stage_raises_on_every_rank(failing, make, kind, message, options):
    booster, model, optimizer = boosted(tiny_llama(num_hidden_layers=4), pp_size=2, **options)
    batches = make() if dist.get_rank() == failing else some_batches(3)
    booster.execute_pipeline(batches, model, lambda outputs, _: outputs.loss, optimizer)
    with pytest.raises(kind, match=message):
        booster.execute_pipeline(batches, model, lambda outputs, _: outputs.loss, optimizer)


@on_ranks(2)
def test_the_dry_run_reads_its_samples_on_every_rank():
    class Streaming:
        """A data set with a generator of its own, which goes on with each sample that is read."""

        def __init__(self):
            self.generator = torch.Generator().manual_seed(7)

        def __len__(self):
            return 16

        def __getitem__(self, _):
            row = torch.randint(64, (8,), generator=self.generator)
            return {"input_ids": row, "labels": row}

    data, found = Streaming(), [None, None]
    booster = Booster(plugin=HybridParallelPlugin(pp_size=2))
    booster.boost(tiny_llama(), dataloader=DataLoader(data, batch_size=2))
    dist.all_gather_object(found, data[0]["input_ids"].tolist())
    assert found[0] == found[1]


# ---- by checksums, of large batches by a sample of their values


@pytest.mark.parametrize("form", ["contiguous", "transposed", "expanded"])
def test_batches_of_other_values_differ(form):
    first, second = (torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    if form == "transposed":
        first, second = first.transpose(0, 3), second.transpose(0, 3)
    if form == "expanded":
        first, second = first[:1].expand(8, -1, -1, -1), second[:1].expand(8, -1, -1, -1)
    assert checksum_of(first) != checksum_of(second)


def test_shapes_and_formats_count():
    numbers = torch.zeros(4, 4)
    assert len({checksum_of(each) for each in (numbers, numbers.view(16), numbers.double())}) == 3


def test_a_difference_in_one_value_of_a_small_tensor_is_seen():
    changed = torch.zeros(64, 64)
    changed[63, 63] = 1
    assert checksum_of(changed) != checksum_of(torch.zeros(64, 64))


def test_every_value_of_a_large_tensor_is_looked_at_in_turn():
    changed = torch.zeros(200, 200)
    changed[123, 45] = 1
    turns = [checksum_of(changed, turn) != checksum_of(torch.zeros(200, 200), turn) for turn in range(5)]
    assert sum(turns) == 1
