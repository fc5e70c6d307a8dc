"""Import time of Booster relative to torch: the median of paired runs of whole processes.

Bar: ``import booster_core`` and ``from booster_core import Booster`` take at most 1.05 of the time of ``import torch``,
and ``booster plugins`` less than 0.3 s.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

NUM_PAIRS = 15


def seconds(*command: str) -> float:
    """Return the wall time of a process, including the start of the interpreter."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - commands of this file
    return time.perf_counter() - start


def main() -> int:
    """Print each figure and its bar; return 1 if a bar is missed."""
    baseline = (sys.executable, "-c", "import torch")
    status = 0
    for statement in ("import booster_core", "from booster_core import Booster"):
        command = (sys.executable, "-c", statement)
        seconds(*baseline), seconds(*command)  # all files are in the page cache now
        pairs = [(seconds(*baseline), seconds(*command)) for _ in range(NUM_PAIRS)]
        ratio = statistics.median(ours / theirs for theirs, ours in pairs)
        ours, theirs = (statistics.median(pair[index] for pair in pairs) for index in (1, 0))
        status |= ratio > 1.05
        print(f"{statement}: {ratio:.3f} of `import torch` ({ours:.3f} s to {theirs:.3f} s); bar 1.05")
    booster = str(Path(sys.executable).with_name("booster"))
    listing = statistics.median(seconds(booster, "plugins") for _ in range(NUM_PAIRS))
    status |= listing >= 0.3
    print(f"booster plugins: {listing:.3f} s; bar 0.3 s")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
