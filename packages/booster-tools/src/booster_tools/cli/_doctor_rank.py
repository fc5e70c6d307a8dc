"""One of the two processes that ``booster doctor`` starts: tries each collective, and prints JSON lines around it.

Run as ``python -m booster_tools.cli._doctor_rank RANK WORLD_SIZE BACKEND FOLDER PORT``. The line before a check tells
the parent which one hangs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import booster_core
from booster_core.ranks import accelerator
from booster_tools.cli._doctor_checks import Checks

if TYPE_CHECKING:
    from collections.abc import Callable

    from booster_tools.cli._doctor_speed import Measured


def _say(check: str, state: str, detail: str = "") -> None:
    print(json.dumps({"check": check, "state": state, "detail": detail}), flush=True)  # noqa: T201 - the parent reads it


def _attempt(name: str, check: Callable[[], Measured | None]) -> bool:
    _say(name, "started")
    try:
        measured = check()
    except Exception as error:  # noqa: BLE001 - whatever a backend raises is what the parent reports
        _say(name, "failed", f"{type(error).__name__}: {error}")
        return False
    if measured is None:
        _say(name, "ok")
    else:
        _say(name, "slow" if measured.is_slow else "ok", measured.text)
    return True


def main(rank: int, world_size: int, backend: str, folder: Path, port: int) -> int:
    """Launch as a script does, try each check, and return the exit status.

    Collective: every rank that the parent started.
    """
    torch.set_num_threads(1)
    device = torch.device("cpu" if backend == "gloo" else accelerator() or "cpu")

    def launch() -> None:
        booster_core.launch(
            rank, world_size, "127.0.0.1", port, backend, rank, seed=None, verbose=False, timeout_seconds=30.0
        )

    # After a failure the ranks may be out of step, so that what follows would tell nothing.
    if not _attempt("launch", launch):
        return 1
    return 0 if all(_attempt(name, check) for name, check in Checks(device, folder)) else 1


if __name__ == "__main__":
    status = main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]))
    sys.stdout.flush()
    # Threads of a backend whose collective failed may never end.
    os._exit(status)
