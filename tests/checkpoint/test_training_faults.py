"""Faults while a training state is saved or loaded: an error on every rank, and the step before is still whole."""

import contextlib
import errno
import os
import re
import shutil
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner
from file_faults import flip_bit
from ranked import on_ranks, raises_on_ranks
from resumable import ResumableRun as Run

import booster_runtime
from booster_checkpoint.run import manifest
from booster_checkpoint.run.manifest import MANIFEST, verify_folder
from booster_checkpoint.storage import LocalLocation
from booster_core.cli import main
from booster_core.errors import CheckpointError, CheckpointUnreadableError
from booster_core.ranks.coordinator import DistCoordinator
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import EXACT, assert_same_tensors

FILES = [
    "model/model-00001-of-00001.safetensors",
    "model/model.safetensors.index.json",
    "optimizer/optimizer-00001-of-00001.safetensors",
    "optimizer/optimizer.safetensors.index.json",
    "optimizer/param_groups.json",
    "training_state.json",
    "training_state.safetensors",
]
LATEST, PARTS = "step-00000006", ("model", "optimizer")


def save_steps(root, numbers, width=32):
    run = Run(width=width)
    for number in numbers:
        run.train(number)
        run.save(root)


def load(root, options):
    run = Run()
    return run.load(root, **options).step


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_steps")
    run_on_ranks(save_steps, 2, str(folder), [3, 6])
    return folder


@pytest.fixture
def root(two_steps, tmp_path):
    """A copy of a root with the steps 3 and 6, to be damaged."""
    shutil.copytree(two_steps, tmp_path / "root")
    return tmp_path / "root"


# ---- what lies on the disk is damaged


def cut(path, end):
    path.write_bytes(path.read_bytes()[:end])


def edit_step(path):
    path.write_text(path.read_text().replace('"step": 6', '"step": 7'))


DAMAGE = {  # what is done to a file of a step, and what is said of it
    **{f"flipped {name}": (name, partial(flip_bit, position=-20), f"'{name}' has the checksum") for name in FILES},
    "truncated": (FILES[0], partial(cut, end=-8), rf"'{FILES[0]}' has \d+ bytes, and was saved with \d+"),
    "missing": (FILES[4], Path.unlink, f"'{FILES[4]}' cannot be found"),
    **{f"manifest up to {end}": (MANIFEST, partial(cut, end=end), r"manifest\.json'") for end in (0, 200, -3)},
    "edited manifest": (MANIFEST, edit_step, "not what its own checksum says"),
    "no latest step": ("", shutil.rmtree, "step-00000006"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_with_the_step_to_load_and_by_inspect(name, root):
    file, spoil, message = DAMAGE[name]
    spoil(root / LATEST / file)
    expect_on_ranks(CheckpointError, f"(?s){message}.*load it with `step=3`", load, 2, str(root), {})
    assert run_on_ranks(load, 2, str(root), {"step": 3}) == [3, 3]
    for path in (root, root / LATEST) if file else (root,):
        shown = CliRunner().invoke(main, ["inspect", "--check", str(path)])
        assert shown.exit_code == 1
        assert re.search(message, shown.output)
    if name == f"flipped {FILES[0]}":  # from below the manifest, too
        outputs = [CliRunner().invoke(main, ["inspect", "--check", str(root / LATEST / part)]).output for part in PARTS]
        assert [bool(re.search(message, output)) for output in outputs] == [True, False]


def test_without_verify_contents_are_taken_as_they_are_but_not_their_size(root):
    flip_bit(root / LATEST / FILES[0], -20)
    assert run_on_ranks(load, 2, str(root), {"verify": False}) == [6, 6]
    cut(root / LATEST / FILES[0], -8)
    expect_on_ranks(CheckpointError, "has .* bytes, and was saved with", load, 2, str(root), {"verify": False})


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"step-00000009\n", b"../elsewhere\n"])
def test_a_file_latest_that_names_no_step_is_an_error(content, root):
    (root / "latest").write_bytes(content)
    expect_on_ranks(CheckpointError, r"latest.*load it with `step=6`", load, 2, str(root), {})


# ---- a run that restarts by itself goes back to the newest step that is whole


@pytest.mark.parametrize(
    ("damage", "step"),
    [
        (lambda root: None, 6),
        (lambda root: flip_bit(root / LATEST / FILES[0], -20), 3),
        (lambda root: (root / LATEST / FILES[-2]).unlink(), 3),
        (lambda root: (root / LATEST / MANIFEST).write_bytes(b"{"), 3),
        (lambda root: (root / "latest").write_bytes(b"\xff"), 6),
        (lambda root: shutil.rmtree(root / LATEST), 3),
    ],
    ids=["none", "bit", "missing", "manifest", "latest", "step"],
)
def test_newest_whole_goes_back_to_a_step_that_is_whole(damage, step, root):
    damage(root)
    assert run_on_ranks(load, 2, str(root), {"step": "newest-whole"}) == [step, step]


def test_an_older_step_that_cannot_be_read_stops_no_run(root, monkeypatch):
    real = LocalLocation.size

    def size(self):
        if "step-00000003" in str(self):
            raise CheckpointUnreadableError(str(self))
        return real(self)

    monkeypatch.setattr(LocalLocation, "size", size)
    assert Run(seed=1).load(root, resume=True).step == 6


def test_newest_whole_says_what_it_leaves_out(root, caplog):
    flip_bit(root / LATEST / FILES[0], -20)
    assert load(root, {"step": "newest-whole"}) == 3
    assert f"'{FILES[0]}' has the checksum" in caplog.text
    assert "Trying 'step-00000003' instead." in caplog.text


def test_newest_whole_prefers_the_steps_before_the_latest(root):
    (root / "latest").write_text("step-00000003\n")  # the run went back
    assert run_on_ranks(load, 2, str(root), {"step": "newest-whole"}) == [3, 3]
    flip_bit(root / "step-00000003" / FILES[0], -20)
    assert run_on_ranks(load, 2, str(root), {"step": "newest-whole"}) == [6, 6]


def test_newest_whole_without_a_whole_step_is_an_error(root, tmp_path):
    for step in ("step-00000003", "step-00000006"):
        flip_bit(root / step / FILES[0], -20)
    options = {"step": "newest-whole"}
    expect_on_ranks(CheckpointError, "No other step there is whole", load, 2, str(root), options)
    expect_on_ranks(CheckpointError, "There is no checkpoint in", load, 2, str(tmp_path / "absent"), options)


@raises_on_ranks(CheckpointError, "step-00000006' was saved without 'ema'", 2)
def test_newest_whole_goes_back_from_damage_alone(root):
    run = Run()
    average = booster_runtime.ema(run.booster, run.model)
    run.booster.load_checkpoint(root, step="newest-whole", **run.objects(), ema=average)


@on_ranks(2)
def test_a_damaged_step_changes_nothing(root):
    if DistCoordinator().is_master():
        flip_bit(root / LATEST / FILES[-1], -20)
    DistCoordinator().block_all()
    run = Run(seed=8)
    before = run.tensors()
    with pytest.raises(CheckpointError, match="has the checksum"):
        run.load(root)
    assert_same_tensors(run.tensors(), before, EXACT)


# ---- the disk fails while a step is written


@on_ranks(2)
def test_an_error_in_the_background_surfaces_at_the_next_save(root):
    run = Run()
    run.train(9)
    with contextlib.ExitStack() as faults:
        if DistCoordinator().is_master():
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            faults.enter_context(mock.patch.object(manifest.Manifest, "write", side_effect=full))
        run.save(root, use_async=True)
        with pytest.raises(CheckpointError, match="The disk is full"):
            run.save(root)
    run.save(root)
    assert run.booster.has_checkpoint(root)
    verify_folder(root / "step-00000009")


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_root_that_is_a_file_is_an_error(name, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    expect_on_ranks(CheckpointError, "is a file", save_steps, 2, str(tmp_path / name), [1])
    expect_on_ranks(CheckpointError, "There is no checkpoint in", load, 2, str(tmp_path / name), {})
    assert (tmp_path / "file").read_text() == "not a folder"
