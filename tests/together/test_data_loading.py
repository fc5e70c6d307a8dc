"""Data loaders under strategies: each sample is counted once in an evaluation, and ranks follow one epoch."""

import torch
from counted_samples import COUNT, Features, evaluate, model_of, train_after_a_peek
from matrix import matrix

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_core.ranks.coordinator import DistCoordinator
from booster_runtime import gather_for_metrics
from booster_testing import expect_on_ranks, run_on_ranks


@matrix(
    ["fsdp-2-boost-True"],
    **{
        "plugin, world_size, how": [
            ("ddp", 2, "boost"),
            ("ddp", 2, "prepare_dataloader"),
            ("ddp", 4, "boost"),
            ("fsdp", 2, "boost"),
            ("gemini", 2, "prepare_dataloader"),
        ]
    },
    is_stream=[False, True],
)
def test_an_evaluation_counts_each_sample_once_in_order(plugin, world_size, is_stream, how):
    """Also where a forward is collective, so that every rank has to make the same number of them."""
    with torch.no_grad():
        expected = model_of()(torch.stack([Features()[index][1] for index in range(COUNT)]))
    for values in run_on_ranks(evaluate, world_size, plugin, is_stream, how):
        assert values["indices"].tolist() == list(range(COUNT))
        torch.testing.assert_close(values["scores"], expected)


def gather_with_shared_batches():
    """Gather where two ranks work on each batch together, and one of them has no values."""
    from booster_hybrid import HybridParallelPlugin

    booster = Booster("cpu", plugin=HybridParallelPlugin(tp_size=2))
    loader = booster.prepare_dataloader(range(COUNT), 2)
    is_last = DistCoordinator().rank % 2 == 1
    gathered = [gather_for_metrics(booster, batch if is_last else None, loader) for batch in loader]
    return torch.cat(gathered).tolist()


def test_ranks_that_share_a_batch_give_its_values_once():
    assert run_on_ranks(gather_with_shared_batches, 4) == [list(range(COUNT))] * 4


def test_a_batch_that_is_taken_on_one_rank_only_is_told_on_every_rank():
    expect_on_ranks(ConfigError, "Ranks follow different epochs of the data loader", train_after_a_peek, 2, "zero", [0])
