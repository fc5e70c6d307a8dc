"""What the process of a second replica group runs for the tests of the first."""

from __future__ import annotations

from typing import Any

from booster_testing.ranks import RankError, run_on_ranks


def on_ranks(*args: Any, **settings: Any) -> list[Any] | str:
    """Return what `run_on_ranks` does, or the text of its error, which can be sent to another process."""
    try:
        return run_on_ranks(*args, **settings)
    except RankError as error:
        return str(error)
