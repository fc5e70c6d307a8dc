"""Import time of Booster relative to torch: the median of paired runs of whole processes.

All contenders have bytecode, as packages that pip has installed do; an editable installation may have none, where
``PYTHONDONTWRITEBYTECODE`` is set.

Bar: ``import booster_core`` and ``from booster_core import Booster`` take at most 1.05 of the time of ``import torch``,
and ``booster plugins`` less than 0.3 s.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _results import compare

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def seconds(*command: str) -> float:
    """Return the wall time of a process, including the start of the interpreter."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT)  # noqa: S603 - commands of this file
    return time.perf_counter() - start


def main() -> int:
    """Print each figure and its bar; return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    num_pairs = parser.parse_args().pairs
    with tempfile.TemporaryDirectory() as bytecode:
        ENVIRONMENT["PYTHONPYCACHEPREFIX"] = bytecode
        return measure(num_pairs)


def measure(num_pairs: int) -> int:
    """Return 1 if a bar is missed."""
    baseline = (sys.executable, "-c", "import torch")
    status = 0
    for statement in ("import booster_core", "from booster_core import Booster"):
        command = (sys.executable, "-c", statement)
        seconds(*baseline), seconds(*command)  # all files are in the page cache now
        pairs = [(seconds(*baseline), seconds(*command)) for _ in range(num_pairs)]
        theirs, ours = zip(*pairs, strict=True)
        status |= not compare(f"`{statement}`", ours, theirs, yardstick="`import torch`", bar=1.05)
    booster = str(Path(sys.executable).with_name("booster"))
    listing = [seconds(booster, "plugins") for _ in range(num_pairs)]
    status |= not compare("`booster plugins`", listing, [0.3] * num_pairs, yardstick="0.3 s", bar=1.0)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
