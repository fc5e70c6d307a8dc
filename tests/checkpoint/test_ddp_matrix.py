"""Saved under DDP on four ranks, loaded on fewer and under the default plugin: the run goes on as before."""

import pytest
import torch

from booster_core.plugin.single import SingleDevicePlugin
from booster_ddp import TorchDDPPlugin
from booster_testing import conformance_runs as runs
from booster_testing import run_on_ranks
from booster_testing.compare import tolerance_for
from booster_testing.training import Training

DDP, SINGLE = Training(plugin_class=TorchDDPPlugin), Training(plugin_class=SingleDevicePlugin)


def means(results):
    """Losses are per rank; every run's global batches are the same."""
    return [sum(losses) / len(losses) for losses in zip(*results, strict=True)]


@pytest.fixture(scope="module", params=[False, True], ids=["one-file", "sharded"])
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp4")
    return folder, run_on_ranks(runs.train_and_save, 4, DDP, str(folder), request.param)


@pytest.mark.parametrize(
    ("training", "world_size"),
    [(DDP, 1), (DDP, 2), (DDP, 3), (DDP, 4), (SINGLE, 1)],
    ids=["ddp-1", "ddp-2", "ddp-3", "ddp-4", "single"],
)
def test_the_next_three_losses_are_those_of_the_uninterrupted_run(saved, training, world_size):
    folder, expected = saved
    actual = run_on_ranks(runs.load_and_train, world_size, training, str(folder))
    if world_size == 4:
        assert actual == expected, "bit for bit, where the arithmetic is the same"
    assert means(actual) == pytest.approx(means(expected), rel=tolerance_for(torch.float32).relative)


def test_saved_under_the_default_plugin_and_loaded_under_ddp(tmp_path):
    expected = run_on_ranks(runs.train_and_save, 1, SINGLE, str(tmp_path), shard=True)
    actual = run_on_ranks(runs.load_and_train, 3, DDP, str(tmp_path))
    assert means(actual) == pytest.approx(means(expected), rel=tolerance_for(torch.float32).relative)
