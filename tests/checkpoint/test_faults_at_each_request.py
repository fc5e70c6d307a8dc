"""An object store that fails at any one request of a save, a load or a listing: the right result, or one that says so.

What passes is not seen. What lasts is an error of the kind that it is: a store that gives no answer is unreachable, one
that refuses is unreadable, and neither says that a step is absent or damaged. Nothing is lost: the steps before stay
whole, a run goes on from the newest of them, and what a load has changed is told.
"""

import pytest
import torch
from resumable import ResumableRun as Run
from tests.shared.s3_server import Fault, need_server

from booster_checkpoint.run.checkpoint_root import open_run
from booster_checkpoint.run.manifest import verify_folder
from booster_checkpoint.storage import locate, obstore_storage
from booster_core.errors import CheckpointUnreadableError, StorageUnreachableError

need_server()
pytest.importorskip("obstore", reason="obstore is what reaches S3")

ROOT = "s3://bucket/run"
LASTS = 10**6
FAULTS = {
    "503 once": ("503", 1, None),
    "cut once": ("lost answer", 1, None),
    "503": ("503", LASTS, StorageUnreachableError),
    "cut": ("lost answer", LASTS, StorageUnreachableError),
    "403": ("403", LASTS, CheckpointUnreadableError),
}
"""The kind of fault, to how many requests in a row it happens, and the error; ``None`` where none may be seen."""
PARTLY = "partly those of this"


@pytest.fixture(autouse=True)
def _empty_bucket(s3, monkeypatch):
    monkeypatch.setattr(obstore_storage, "_PAUSES", (0.0, 0.0))
    yield
    s3.reset()
    locate(ROOT).remove()


@torch.no_grad()
def filled(step):
    """Return a run whose parameters are all the number of its step."""
    run = Run(seed=8)
    run.step = step
    for parameter in run.model.unwrap().parameters():
        parameter.fill_(float(step))
    return run


def values_of(run):
    return {value for parameter in run.model.unwrap().parameters() for value in parameter.unique().tolist()}


def requests_of(s3, act):
    """Return how many requests an act makes where nothing fails."""
    s3.reset()
    act()
    return len(s3.requests)


def fails(s3, fault, number, act, *args):
    """Let requests from one on fail, and return the error of an act."""
    kind, times, _ = FAULTS[fault]
    s3.faults = [Fault("", "", kind, times, after=number)]
    try:
        act(*args)
    except Exception as error:  # noqa: BLE001 - what it is, is looked at by the caller
        return error
    finally:
        s3.faults = []
    return None


def about_error(fault, error):
    """Return what is wrong with an error."""
    expected = FAULTS[fault][2]
    if error is None or (expected is not None and type(error) is expected and ROOT in str(error)):
        return []
    return [f"raises {type(error).__name__}: {str(error)[:300]}"]


def cells(quick):
    for fault in FAULTS:
        yield pytest.param(fault, 4, marks=[] if fault in quick else pytest.mark.slow, id=fault)
        yield pytest.param(fault, 1, marks=pytest.mark.slow, id=f"{fault}-all")


@pytest.mark.parametrize(("fault", "every"), list(cells({"503"})))
def test_a_save_that_fails_at_any_request_loses_nothing(fault, every, s3):
    filled(1).save(ROOT)
    count = requests_of(s3, lambda: filled(2).save(ROOT))
    assert count > 15
    wrong, num_failed, last = [], 0, 2
    for step, number in enumerate(range(0, count, every), start=3):
        error = fails(s3, fault, number, filled(step).save, ROOT)
        num_failed += error is not None
        run = filled(0)
        found = run.load(ROOT, resume=True).step
        told = about_error(fault, error)
        if found not in ((step,) if error is None else (last, step)) or values_of(run) != {float(found)}:
            told.append(f"step {found} with {values_of(run)} after a save of step {step}, {last} before")
        for name in open_run(ROOT).steps()[-2:]:
            verify_folder(locate(ROOT) / name)
        last = found
        wrong += [f"request {number}: {each}" for each in told]
    assert not wrong, "\n".join(wrong)
    assert num_failed == 0 or FAULTS[fault][2] is not None
    assert num_failed > 0 or FAULTS[fault][2] is None
    filled(step + 1).save(ROOT)
    run = filled(0)
    assert (run.load(ROOT).step, values_of(run)) == (step + 1, {float(step + 1)})


@pytest.mark.parametrize(("fault", "every"), list(cells({"cut"})))
@pytest.mark.parametrize("resume", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_load_that_fails_at_any_request_takes_no_older_step(resume, fault, every, s3):
    for step in (1, 2):
        filled(step).save(ROOT)
    count = requests_of(s3, lambda: filled(0).load(ROOT, resume=resume))
    assert count > 8
    wrong, num_failed = [], 0
    for number in range(0, count, every):
        run = filled(0)
        error = fails(s3, fault, number, lambda run=run: run.load(ROOT, resume=resume))
        num_failed += error is not None
        told = about_error(fault, error)
        if error is None and (run.step, values_of(run)) != (2, {2.0}):
            told.append(f"loads step {run.step}, values {values_of(run)}")
        if error is not None and values_of(run) != {0.0} and PARTLY not in str(error):
            told.append(f"changes values and does not say so: {error}")
        wrong += [f"request {number}: {each}" for each in told]
    assert open_run(ROOT).steps() == ["step-00000001", "step-00000002"]
    assert not wrong, "\n".join(wrong)
    assert (num_failed > 0) == (FAULTS[fault][2] is not None)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_listing_that_fails_does_not_say_that_nothing_is_there(fault, s3):
    filled(1).save(ROOT)
    looks = {
        "has_checkpoint": lambda: Run().booster.has_checkpoint(ROOT),
        "steps": lambda: open_run(ROOT).steps(),
        "children": lambda: locate(ROOT).children(),
    }
    for name, look in looks.items():
        count = requests_of(s3, look)
        assert count >= 1
        for number in range(count):
            found = []
            error = fails(s3, fault, number, lambda look=look, found=found: found.append(look()))
            assert about_error(fault, error) == [], (name, number)
            assert error is not None or found[0], (name, number)
            assert (error is None) == (FAULTS[fault][2] is None), (name, number)
