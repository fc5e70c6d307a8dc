"""Time limits that other processes on the machine don't use up, and whether those live."""

import contextlib
import os
import time
from pathlib import Path


def unhindered_seconds():
    """Return the time on a clock that stands still while threads of this process wait for a processor."""
    waited = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # the thread may have ended meanwhile
            waited += int(file.read_text(encoding="ascii").split()[1])
    return time.monotonic() - waited * 1e-9


def is_alive(pid):
    """Return whether there is a process of this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
