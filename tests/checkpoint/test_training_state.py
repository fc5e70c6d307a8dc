"""A run that is stopped and resumed equals one that was never stopped."""

import contextlib
import gc
import random
import shutil
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from engine_calls import on_hosts, on_hosts_with_disks_of_their_own
from matrix import matrix
from ranked import on_ranks, raises_on_ranks
from resumable import ResumableRun as Run
from torch import nn

from booster_checkpoint.load.fill import ShardReader
from booster_checkpoint.run.manifest import verify_folder
from booster_checkpoint.storage import LocalLocation
from booster_core import Booster
from booster_core.errors import CheckpointError, ConfigError
from booster_core.ranks.coordinator import DistCoordinator
from booster_testing import run_on_ranks
from booster_testing.compare import EXACT, assert_same_tensors


def save_at(root, options, step, save_options):
    run = Run(**options)
    run.train(step)
    run.save(root, extra={"best": 0.5, "history": torch.arange(3), "nested": [{"a": None}]}, **save_options)
    if save_options.get("use_async"):
        run.train(step + 2)  # changes everything while it is written
    run.booster.wait()
    return run.seen[: step * options.get("batch", 2)]


def resume(root, options, steps):
    run = Run(**{**options, "seed": 9})  # other random states, which the load has to replace
    random.random()
    loaded = run.load(root)
    assert loaded.extra["best"] == 0.5
    assert loaded.extra["history"].tolist() == [0, 1, 2]
    assert loaded.extra["nested"] == [{"a": None}]
    start = loaded.step
    losses = run.train(steps)
    return start, losses, run.tensors(), run.seen


@pytest.mark.parametrize(
    ("world_size", "options", "save_options", "step"),
    [
        (1, {}, {}, 5),
        pytest.param(2, {}, {}, 5, marks=pytest.mark.slow),
        pytest.param(2, {}, {"use_async": True}, 5, marks=pytest.mark.slow),
        pytest.param(2, {"precision": "fp16"}, {}, 5, marks=pytest.mark.slow),
        pytest.param(2, {"precision": "bf16", "workers": 2}, {"size_per_shard": 1}, 7, marks=pytest.mark.slow),
        pytest.param(2, {}, {}, 12, marks=pytest.mark.slow),
    ],
    ids=["one", "two", "async", "fp16", "workers", "end_of_epoch"],
)
@on_ranks("world_size", timeout_seconds=180)  # three trainings
def test_a_resumed_run_equals_an_uninterrupted_one(world_size, options, save_options, step, tmp_path):
    expected = Run(**options)
    losses = expected.train(20)
    save_at(tmp_path, options, step, save_options)
    start, later, restored, _ = resume(tmp_path, options, 20)
    assert start == step
    assert later == losses[step:]
    assert_same_tensors(restored, expected.tensors(), EXACT)


def test_a_step_of_format_4_that_was_written_long_ago_loads_and_is_written_alike(tmp_path):
    """The archive has what `Run(width=4)` saved after three steps. It stays where the format changes."""
    shutil.unpack_archive(Path(__file__).with_name("run_of_format_4.zip"), tmp_path / "old")
    run, whole = Run(width=4, seed=9), Run(width=4)
    loaded = run.load(tmp_path / "old")
    assert (loaded.step, loaded.extra["note"], run.scheduler.last_epoch) == (3, "ü", 3)
    assert run.optimizer.param_groups[0]["lr"] == run.scheduler.get_last_lr()[0] < 0.01
    run.save(tmp_path / "new", extra=loaded.extra)
    old = tmp_path / "old" / "step-00000003"
    for pattern, number in (("*.safetensors", 3), ("*.index.json", 2)):
        paths = [path.relative_to(old) for path in old.rglob(pattern)]
        assert len(paths) == number
        for path in paths:
            assert (tmp_path / "new" / old.name / path).read_bytes() == (old / path).read_bytes(), path
    run.train(6)
    whole.train(6)
    assert run.seen == whole.seen[6:]


@matrix(
    ["2-1-4-0-False"],
    **{"before, after, batch": [(4, 2, 2), (2, 3, 2), (2, 1, 4)]},
    workers=[0, 2],
    drop_last=[False, True],
)
def test_another_number_of_ranks_sees_each_sample_once(before, after, batch, workers, drop_last, tmp_path):
    samples, step = 48, 2
    options = {"samples": samples, "batch": batch, "workers": workers, "drop_last": drop_last}
    seen = [index for of_rank in run_on_ranks(save_at, before, str(tmp_path), options, step, {}) for index in of_rank]
    assert len(seen) == step * batch * before
    rest = (samples - len(seen)) // (batch * after)
    for *_, of_rank in run_on_ranks(resume, after, str(tmp_path), options, step + rest):
        seen += of_rank
    assert len(set(seen)) == len(seen)
    assert samples - len(seen) < batch * after


def drawn_after(call, seed, root):
    getattr(Run(seed=seed), call)(root)
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()  # noqa: NPY002 - the global generator is meant


def test_random_states_come_back_rank_by_rank_and_further_ranks_have_their_own(tmp_path):
    saved = run_on_ranks(drawn_after, 2, "save", 3, tmp_path)
    loaded = run_on_ranks(drawn_after, 4, "load", 4, tmp_path)
    assert loaded[:2] == saved
    for drawn in (saved, loaded):  # no two ranks draw the same from any generator
        assert all(len(set(values)) == len(drawn) for values in zip(*drawn, strict=True))
    assert run_on_ranks(drawn_after, 4, "load", 4, tmp_path) == loaded


def save_several(root, steps):
    run = Run()
    for run.step in steps:
        run.save(root)
    return sorted(path.name for path in Path(root).iterdir())


def test_two_models_do_not_replace_each_other_at_one_step(tmp_path):
    booster = Booster()
    generator, discriminator = (booster.boost(nn.Linear(4, width))[0] for width in (8, 2))
    booster.save_checkpoint(tmp_path, step=10, model=generator)
    with pytest.raises(ConfigError, match=r"Step 10 in .* is that of another model, a `Linear`.*a folder of its own"):
        booster.save_checkpoint(tmp_path, step=10, model=discriminator)
    assert booster.load_checkpoint(tmp_path, model=generator).step == 10
    booster.save_checkpoint(tmp_path, step=10, model=generator)  # the same model may be saved once more
    assert booster.load_checkpoint(tmp_path, model=generator).path.endswith("step-00000010.1")


def test_a_model_that_is_garbage_is_replaced(tmp_path):
    booster = Booster()
    gone = nn.Linear(4, 8)
    gone.itself = [gone]
    gc.collect()
    gc.disable()
    try:
        booster.save_checkpoint(tmp_path, step=10, model=booster.boost(gone)[0])
        del gone
        booster.save_checkpoint(tmp_path, step=10, model=booster.boost(nn.Linear(4, 8))[0])
    finally:
        gc.enable()


def other_groups(run):
    run.optimizer.unwrap().param_groups.append({**run.optimizer.param_groups[0], "params": []})


def other_scheduler(run):
    run.scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer.unwrap(), 0.9)


def other_kind_of_state(run):
    for state in run.optimizer.unwrap().state.values():
        state["exp_avg"] = state["exp_avg"].long()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_groups, "has 1 parameter groups, this optimizer has 2"),
        (other_scheduler, "holds the state of a CosineAnnealingLR; this scheduler is a ExponentialLR"),
        (other_kind_of_state, "float32 in the checkpoint, torch.int64 here"),
    ],
)
def test_what_does_not_fit_is_found_before_anything_changes(change, message, tmp_path):
    saved = Run()
    saved.train(2)
    saved.save(tmp_path)
    run = Run(seed=1)
    run.train(1)
    change(run)
    values, others = run.tensors(), (run.optimizer.param_groups[0]["lr"], run.scheduler.state_dict())
    with pytest.raises(CheckpointError, match=message):
        run.load(tmp_path)
    assert_same_tensors(run.tensors(), values, EXACT)
    assert others == (run.optimizer.param_groups[0]["lr"], run.scheduler.state_dict())


@pytest.mark.parametrize(
    ("steps", "names", "latest"),
    [
        ([1, 7, 7, 7], ["step-00000001", "step-00000007.2"], "step-00000007.2\n"),
        ([1, 7, 1], ["step-00000001.1", "step-00000007"], "step-00000001.1\n"),
    ],
)
def test_a_step_saved_again_is_replaced_by_its_next_revision(steps, names, latest, tmp_path):
    assert save_several(tmp_path, steps) == ["latest", "lease.json", *names]
    assert (tmp_path / "latest").read_text() == latest


def test_without_the_file_latest_the_highest_step_is_latest(tmp_path):
    save_several(tmp_path, [1, 2])
    (tmp_path / "latest").unlink()
    assert Run().load(tmp_path).step == 2


def test_an_empty_root_is_an_error_and_holds_no_checkpoint(tmp_path):
    run = Run()
    assert not run.booster.has_checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"There is no checkpoint in .*has_checkpoint"):
        run.load(tmp_path)
    run.save(tmp_path)
    assert run.booster.has_checkpoint(tmp_path)


def test_an_unknown_step_is_an_error_that_lists_the_others(tmp_path):
    save_several(tmp_path, [1, 2])
    with pytest.raises(CheckpointError, match=r"There is no step 5 in .* Steps there: 1, 2\."):
        Run().load(tmp_path, step=5)


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"a": [1, object()]}, "'extra/a/1' is "),
        ({"model": torch.nn.Linear(1, 1)}, "'extra/model' is "),
        ({"array": np.zeros(2)}, "'extra/array' is "),
        ({"t": torch.empty(2, device="meta")}, "'extra/t' is "),
        ({"deep": nested(5000)}, "nested too deeply"),
    ],
    ids=["object", "module", "array", "meta", "deep"],
)
def test_extra_that_is_no_json_is_refused_by_its_path(extra, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        Run().save(tmp_path / "run", extra=extra)
    assert list(tmp_path.iterdir()) == []


@raises_on_ranks(ConfigError, "disagree about `step`: 0 on rank 0, 1 on rank 1", 2)
def test_ranks_that_disagree_about_the_step_are_told(tmp_path):
    run = Run()
    run.step = DistCoordinator().rank
    run.save(tmp_path)


@raises_on_ranks(CheckpointError, "Rank 1 has another state of `lr_schedulers`", 2)
def test_ranks_that_disagree_about_the_scheduler_are_told(tmp_path):
    run = Run()
    if DistCoordinator().rank == 1:
        run.scheduler.T_max = 51
    run.save(tmp_path)


def test_a_loader_without_a_position_is_refused(tmp_path):
    run = Run()
    run.loader = torch.utils.data.DataLoader([1, 2, 3])
    with pytest.raises(CheckpointError, match="`DataLoader`, which cannot tell its position"):
        run.save(tmp_path)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("optimizer", "was saved without 'optimizer'"),
        ("lr_scheduler", "holds the states of 0 learning rate schedulers; 1 are"),
        ("dataloader", "was saved without a data loader"),
    ],
)
def test_what_was_not_saved_is_not_loaded(kind, message, tmp_path):
    run = Run()
    run.booster.save_checkpoint(tmp_path, step=1, model=run.model)
    run.booster.load_checkpoint(tmp_path, model=run.model)
    with pytest.raises(CheckpointError, match=message):
        run.booster.load_checkpoint(tmp_path, model=run.model, **{kind: run.objects()[kind]})


@on_ranks(2)
def test_rank_0_writes_for_ranks_that_do_not_share_its_disk(tmp_path):
    run, fresh = Run(), Run(seed=9)
    run.train(3)
    with on_hosts_with_disks_of_their_own([0, 1]):
        run.save(tmp_path, use_async=True)
        run.booster.wait()
    verify_folder(tmp_path / "step-00000003")
    fresh.load(tmp_path)
    assert_same_tensors(fresh.tensors(), run.tensors(), EXACT)


@on_ranks(3)
def test_one_rank_of_each_host_reads_the_manifest(tmp_path):
    save_several(tmp_path, [1])
    read, real = [], LocalLocation.read_bytes

    def counted(self):
        read.append(self.name)
        return real(self)

    run = Run()
    with mock.patch.object(LocalLocation, "read_bytes", counted), on_hosts((0, 1, 1)):
        run.load(tmp_path)
    assert (read.count("manifest.json"), run.step) == [(1, 1), (1, 1), (0, 1)][DistCoordinator().rank]


@on_ranks(2)
def test_ranks_wait_for_one_that_reads_for_long(tmp_path):
    """Rank 1 reads its first values for longer than ranks wait for each other in other calls."""
    save_several(tmp_path, [2])
    run = Run()
    run.booster.context  # noqa: B018 - made with the launch's limit
    real, slept = ShardReader.fill, []

    def fill(self, shard, key):
        if DistCoordinator().rank == 1 and not slept:
            slept.append(True)
            time.sleep(6.0)
        real(self, shard, key)

    run.booster.checkpoint_io._session._timeout_seconds = 60.0
    with mock.patch.object(ShardReader, "fill", fill), mock.patch.object(DistCoordinator, "timeout_seconds", 2.0):
        run.load(tmp_path)
    assert len(slept) == DistCoordinator().rank


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
    assert limits == [3600.0, pytest.approx(3600 + (200 << 30) / 20e6)]
