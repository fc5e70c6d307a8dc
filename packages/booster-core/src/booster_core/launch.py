"""The start of a distributed run."""

from __future__ import annotations

import os


def local_rank_from_environment() -> int | None:
    """Return the launcher's local rank, if it told one."""
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if text.isdigit() else None
