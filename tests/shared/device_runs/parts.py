"""Several checks in one case: a process on a device takes seconds to start, and most checks of one rank are quicker."""

import gc
import time
import traceback
from dataclasses import replace

import torch

from device_runs.cases import CannotRun, Case

_LAST_LINES = 14


def run_parts(setting, *, parts):
    """Run each part in a folder of its own, also after one that has failed, and raise for all that have.

    Raises:
        AssertionError: If a part failed; the last lines of each are in it.
        CannotRun: If none could run.
    """
    figures = []
    failures, absences = [], []
    for number, part in enumerate(parts):
        if part.only_on not in ("", setting.device):
            absences.append(f"{part.name}: needs a {part.only_on} device")
            continue
        folder = setting.folder / str(number)
        folder.mkdir(exist_ok=True)
        started = time.monotonic()
        try:
            figures += part.function(replace(setting, folder=folder), **part.options) or ()
        except CannotRun as reason:
            absences.append(f"{part.name}: {reason}")
        except Exception:  # noqa: BLE001 - told below
            failures.append(f"-- {part.name}\n" + "\n".join(traceback.format_exc().splitlines()[-_LAST_LINES:]))
        print(f"{time.monotonic() - started:5.1f} s  {part.name}", flush=True)
        gc.collect()
        if setting.is_real:
            torch.cuda.empty_cache()
    print("\n".join(absences))
    assert not failures, f"{len(failures)} of {len(parts)} parts failed\n" + "\n".join(failures)
    if len(absences) == len(parts):
        raise CannotRun("; ".join(absences))
    return figures


def case_of(name, parts, *, seconds=90.0):
    """Return a case of others, whose names are unique in it; it needs a device of a type if all of them do."""
    names = [part.name for part in parts]
    assert len(set(names)) == len(names), names
    kinds = {part.only_on for part in parts}
    return Case(
        name, run_parts, {"parts": tuple(parts)}, seconds=seconds, only_on=kinds.pop() if len(kinds) == 1 else ""
    )
