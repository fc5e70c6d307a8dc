"""The logger ``booster``: what a run reports of itself, on rank 0 unless asked otherwise.

``BOOSTER_LOG`` is a level, ``all`` for the messages of all ranks, or both: ``BOOSTER_LOG=info,all``. Without it the
logger is as the application's logging says, which shows warnings by default. Core logs to the same logger, by its name.
"""

from __future__ import annotations

import logging
import os
import sys

from booster_core.errors import ConfigError
from booster_core.ranks import current_world

__all__ = ["ANY_RANK", "configure_log", "log"]

_VARIABLE, _ALL = "BOOSTER_LOG", "all"
_LEVELS = ("debug", "info", "warning", "error")
_FORMAT = "%(asctime)s booster %(levelname)s rank %(booster_rank)d: %(message)s"

log = logging.getLogger("booster")
"""The one logger of all distributions. A record with ``extra=ANY_RANK`` is shown whichever rank logs it."""
ANY_RANK = {"booster_any_rank": True}


class _RankFilter(logging.Filter):
    """Drops the records of ranks other than 0, and tells the others' format which rank they are from."""

    shows_all = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to show a record."""
        record.booster_rank = rank = current_world().rank
        return rank == 0 or self.shows_all or hasattr(record, "booster_any_rank")


class _OwnHandler(logging.StreamHandler):  # type: ignore[type-arg] # not generic at run time before Python 3.11
    """Prints to the standard error stream, unless the application has handlers, which print the record too."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter(_FORMAT))

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether no handler of the application prints the record."""
        return not logging.getLogger().handlers and bool(super().filter(record))


_filter = _RankFilter()


def configure_log() -> None:
    """Show the records of rank 0, or those that `BOOSTER_LOG` asks for.

    Raises:
        ConfigError: If `BOOSTER_LOG` lists anything but one level and ``all``.
    """
    words = [word.strip().lower() for word in os.environ.get(_VARIABLE, "").split(",") if word.strip()]
    levels = [word for word in words if word != _ALL]
    if len(levels) > 1 or not set(levels) <= set(_LEVELS):
        msg = (
            f"{_VARIABLE}={os.environ[_VARIABLE]!r} must be one of {', '.join(_LEVELS)}, with or without `,{_ALL}` for "
            "the messages of all ranks."
        )
        raise ConfigError(msg)
    _filter.shows_all = _ALL in words
    log.addFilter(_filter)  # once, however often it is added
    if levels:
        log.setLevel(levels[0].upper())
    if words and not any(isinstance(handler, _OwnHandler) for handler in log.handlers):
        log.addHandler(_OwnHandler())
