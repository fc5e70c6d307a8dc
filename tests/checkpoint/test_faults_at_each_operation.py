"""A disk that fails at any one file operation of a load or a save: the right result, or one error that says so.

An error is of the same kind on every rank and names a path. A disk that gives no answer says nothing of what it holds:
no step counts as absent or damaged because of it, and a run does not go back to an older one. Model and optimizer are
as before, unless the error says otherwise.
"""

import errno
import itertools
import re
import shutil
from pathlib import Path

import pytest
import torch
from file_faults import FileFaults
from ranked import on_ranks
from resumable import ResumableRun as Run

from booster_checkpoint.run.manifest import verify_folder
from booster_core.errors import (
    CheckpointAbsentError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointUnreadableError,
)
from booster_core.ranks.coordinator import DistCoordinator

READING = ("open", "stat", "list", "read")
WRITING = (*READING, "write", "sync", "rename", "remove", "mkdir")
ACTIONS = {
    "load_checkpoint": READING,
    "resume": WRITING,
    "load_model": READING,
    "has_checkpoint": READING,
    "save_checkpoint": WRITING,
    "save_model": WRITING,
}
QUICK = [(errno.EIO, False, 0)]
ALL = list(itertools.product((errno.EIO, errno.EACCES), (False, True), (0, 1)))
PARTLY = "partly those of this"


def make():
    """Return a run whose every value says that nothing was loaded."""
    run = Run(seed=8)
    run.train(1)
    set_all(run, -1)
    return run


@torch.no_grad()
def set_all(run, step):
    run.step = step
    for tensor in tensors_of(run):
        tensor.fill_(step)


def tensors_of(run):
    states = run.optimizer.unwrap().state.values()
    return [*run.model.unwrap().parameters(), *(state["exp_avg"] for state in states)]


def values_of(run):
    """Return the distinct values of model and optimizer."""
    return sorted({value for tensor in tensors_of(run) for value in tensor.unique().tolist()})


def prepare(root):
    """Save the steps 3 and 6, and a model."""
    run = make()
    for step in (3, 6):
        set_all(run, step)
        run.save(root)
    run.booster.save_model(run.model, f"{root}/model", shard=True)


def act(action, run, root):
    """Do what is tested; return what is wrong with its result."""
    if action in ("load_checkpoint", "resume"):
        loaded = run.load(root, **({"resume": True} if action == "resume" else {}))
        return [] if (loaded.step, values_of(run)) == (6, [6.0]) else [f"step {loaded.step}, values {values_of(run)}"]
    if action == "load_model":
        run.booster.load_model(run.model, f"{root}/model")
        found = {value for parameter in run.model.unwrap().parameters() for value in parameter.unique().tolist()}
        return [] if found == {6.0} else [f"values {found}"]
    if action == "has_checkpoint":
        return [] if run.booster.has_checkpoint(root) else ["says that nothing is there"]
    set_all(run, 9)
    if action == "save_checkpoint":
        run.save(root)
    else:
        run.booster.save_model(run.model, f"{root}/model", shard=True)
    return []


def what_is_left(action, root, *, has_failed):
    """Return what is wrong with the files that a save left; all ranks look at what a new run loads.

    Collective: every rank.
    """
    run = make()
    allowed = (6.0, 9.0) if has_failed else (9.0,)
    try:
        if action == "save_checkpoint":
            step = run.load(root).step
            found = {float(step), *values_of(run)}
            verify_folder(Path(root) / f"step-{step:08d}")
        else:
            run.booster.load_model(run.model, f"{root}/model")
            found = {value for parameter in run.model.unwrap().parameters() for value in parameter.unique().tolist()}
    except CheckpointError as error:
        if has_failed and action == "save_model" and "Save again, or load another checkpoint" in str(error):
            return []  # a folder of several files is replaced file by file, and says so where that ended
        return [f"leaves what does not load: {str(error).replace(root, 'ROOT')[:400]}"]
    return [] if len(found) == 1 and found <= set(allowed) else [f"leaves {found}"]


def about_error(action, error, root, before, after):
    """Return what is wrong with an error."""
    text, wrong = str(error), []
    kind = type(error)
    if action.startswith("save"):
        if not isinstance(error, CheckpointError) or kind in (CheckpointAbsentError, CheckpointDamagedError):
            wrong.append(f"raises {kind.__name__}")
    elif kind is not CheckpointUnreadableError:
        wrong.append(f"raises {kind.__name__}")
    elif "cannot be read" not in text:
        wrong.append("does not say that it cannot be read")
    if root not in text:
        wrong.append("names no path")
    if action == "resume" and "step-00000006" in text and "step=3" not in text:
        wrong.append("does not name the older step that is whole")
    if before != after and PARTLY not in text:
        wrong.append("changes values and does not say so")
    shown = re.sub(r"^rank \d+: ", "", text).replace(root, "ROOT")[:400]
    return [f"{each}: {shown}" for each in wrong]


def cells():
    for action, operations in ACTIONS.items():
        for operation in operations:
            for is_whole in (False, True):
                name = f"{action}-{operation}{'-all' if is_whole else ''}"
                marks = [pytest.mark.slow] if is_whole else []
                yield pytest.param(action, operation, is_whole, id=name, marks=marks)


@pytest.mark.parametrize(("action", "operation", "is_whole"), list(cells()))
@on_ranks(2, timeout_seconds=1200)
def test_a_fault_at_each_operation(action, operation, is_whole, tmp_path):
    """Each operation fails in turn, or every fifth one; what is wrong is told in words."""
    cases, every = (ALL, 1) if is_whole else (QUICK, 5)
    world = DistCoordinator()
    source, complaints = f"{tmp_path}/source", []
    prepare(source)
    for code, is_lasting, failing_rank in cases:
        for number in itertools.count(1, every):
            root = f"{tmp_path}/root"
            if action in ("load_checkpoint", "load_model", "has_checkpoint"):
                root = source
            elif world.rank == 0:
                shutil.rmtree(root, ignore_errors=True)
                shutil.copytree(source, root)
            world.all_gather_object(number)  # the copy is there
            run = make()
            error, wrong, before = None, [], values_of(run)
            own = number if world.rank == failing_rank else 0
            with FileFaults(root, operation, own, code, is_lasting=is_lasting) as faults:
                try:
                    wrong = act(action, run, root)
                except Exception as caught:  # noqa: BLE001 - what it is, is looked at below
                    error = caught
            if error is not None:
                expected = [9.0] if action.startswith("save") else before
                wrong += about_error(action, error, root, expected, values_of(run))
            told = world.all_gather_object((faults.hit, type(error).__name__, wrong))
            hit = told[failing_rank][0]
            if hit is None:
                assert not wrong, "it goes wrong where nothing fails"
                break
            if len({kind for _, kind, _ in told}) > 1:
                wrong.append(f"ends differently on each rank: {[kind for _, kind, _ in told]}")
            if action.startswith("save"):
                wrong += what_is_left(action, root, has_failed=error is not None)
                world.all_gather_object(number)  # all have looked at the files, which the next turn replaces
            often, where = " for good" if is_lasting else "", hit.replace(root, "ROOT")
            name = f"{errno.errorcode[code]}{often} on rank {failing_rank}, {where} ({number})"
            complaints += [f"{name}: {each}" for each in wrong]
    assert not complaints, "\n".join(complaints)
