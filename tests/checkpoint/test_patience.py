"""A rank that reads for long: the others wait for it, as they wait for each other's disks in a save."""

import contextlib
import time
from unittest import mock

import pytest
from matrix import matrix
from resumable import ResumableRun as Run

from booster_checkpoint.load.fill import ShardReader
from booster_core import Booster
from booster_core.ranks.coordinator import DistCoordinator
from booster_testing import run_on_ranks

LIMIT, READ = 2.0, 6.0


def save(root):
    run = Run()
    run.train(2)
    run.save(root)
    run.booster.save_model(run.model, f"{root}/m.safetensors")
    run.booster.save_optimizer(run.optimizer, f"{root}/o.safetensors")


def load_slowly(root, call):
    run = Run()
    run.booster.context  # noqa: B018 - made with the launch's limit
    real, slept = ShardReader.fill, []

    def fill(self, shard, key):
        if DistCoordinator().rank == 1 and not slept:
            slept.append(True)
            time.sleep(READ)
        real(self, shard, key)

    run.booster.checkpoint_io._session._timeout_seconds = 60.0
    with mock.patch.object(ShardReader, "fill", fill), mock.patch.object(DistCoordinator, "timeout_seconds", LIMIT):
        if call == "load_checkpoint":
            run.load(root)
        elif call == "load_model":
            run.booster.load_model(run.model, f"{root}/m.safetensors")
        else:
            run.booster.load_optimizer(run.optimizer, f"{root}/o.safetensors")
    return len(slept)


@matrix(["load_checkpoint"], call=["load_model", "load_optimizer", "load_checkpoint"])
def test_ranks_wait_for_one_that_reads_for_long(call, tmp_path):
    run_on_ranks(save, 2, str(tmp_path))
    assert run_on_ranks(load_slowly, 2, str(tmp_path), call) == [0, 1]


def test_a_large_checkpoint_is_waited_for_longer_and_none_for_ever():
    session = Booster("cpu").checkpoint_io._session
    limits = []

    def noted(_, __, *, timeout_seconds):
        limits.append(timeout_seconds)
        return contextlib.nullcontext()

    with mock.patch.object(DistCoordinator, "together", noted):
        for nbytes in (0, 200 << 30):
            with session.together("save", "path", for_long=True, nbytes=nbytes):
                pass
    assert limits[0] == 3600.0
    assert limits[1] == pytest.approx(3600 + (200 << 30) / 20e6)
