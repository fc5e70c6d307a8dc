"""The exceptions that Booster raises for what a user, a file or another process can get wrong.

A message says what was asked, what was found and what to do, with the values in it. A wrong type is
Python's own ``TypeError``; everything else derives from `BoosterError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MAX_SHOWN = 10

__all__ = [
    "AbsentValueError",
    "BoosterError",
    "BudgetError",
    "CheckpointAbsentError",
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointUnreadableError",
    "ConfigError",
    "GradientError",
    "LaunchError",
    "LazyInitError",
    "MissingRanksError",
    "OffloadError",
    "PluginError",
    "PluginNotInstalledError",
    "RankFailedError",
    "StorageUnreachableError",
    "shorten",
]


class BoosterError(Exception):
    """Base class of every error that Booster raises on purpose."""


class ConfigError(BoosterError, ValueError):
    """A value that the user chose is wrong, or contradicts another one."""


class BudgetError(ConfigError):
    """A memory budget is smaller than what must be held at once.

    Attributes:
        least_bytes: The least budget that would do.
        moment: What the model does when it needs that much, such as ``"forward of head"``; ``""`` where unknown.
    """

    def __init__(self, message: str, *, least_bytes: int = 0, moment: str = "") -> None:
        super().__init__(message)
        self.least_bytes, self.moment = least_bytes, moment


class LaunchError(BoosterError, RuntimeError):
    """The process group could not be started: unreachable host, port in use, missing ranks."""


class PluginError(BoosterError):
    """A plugin is unknown, doubled, broken, or made for another version of the plugin interface."""


class PluginNotInstalledError(PluginError, ImportError):
    """A plugin's class was imported from `booster_core.plugin`, but its distribution is not installed."""


class CheckpointError(BoosterError):
    """A checkpoint cannot be written or read: path, permission, space, layout, or content."""


class CheckpointAbsentError(CheckpointError):
    """Nothing is there: no checkpoint, no such step, no such file."""


class CheckpointDamagedError(CheckpointError):
    """What was read is not what was saved: cut off, changed, or not of the format that it claims to be."""


class CheckpointUnreadableError(CheckpointError):
    """It is there, and its disk or its permissions refuse it. Nothing is known of its content."""


class StorageUnreachableError(CheckpointError):
    """A storage gave no answer, after its own retries. Nothing is known of what it holds."""


class OffloadError(BoosterError):
    """An offload target is unavailable: its disk is full, or its folder is gone."""


class MissingRanksError(BoosterError, TimeoutError):
    """Some ranks did not reach a collective call within the time limit; the message names them."""


class RankFailedError(BoosterError, RuntimeError):
    """Another rank failed; the message carries its rank, error and traceback."""


class GradientError(BoosterError, RuntimeError):
    """A loss has no gradient, a norm is not finite where that was forbidden, or backward was misused."""


class LazyInitError(BoosterError, RuntimeError):
    """A model that has no values yet is used as if it had, or its recording can't be replayed."""


class AbsentValueError(BoosterError, RuntimeError):
    """A value is read that this rank can't know: one of a layer or parameter that another pipeline stage has."""


def shorten(names: Iterable[str]) -> str:
    """Return names for a message: the first ten, in quotes, and how many more there are."""
    listed = list(names)
    text = ", ".join(f"'{name}'" for name in listed[:_MAX_SHOWN])
    return text if len(listed) <= _MAX_SHOWN else f"{text} and {len(listed) - _MAX_SHOWN} more"


def name_ranks(ranks: Sequence[int], num_ranks: int | None = None) -> str:
    """Return "rank 3", "ranks 1, 2 and 5" or, beyond ten, "ranks 0, 1, ... and 17 others"."""
    num_ranks = len(ranks) if num_ranks is None else num_ranks
    if num_ranks == 1:
        return f"rank {ranks[0]}"
    named = [str(rank) for rank in ranks[:_MAX_SHOWN]]
    if num_ranks > len(named):
        return f"ranks {', '.join(named)} and {num_ranks - len(named)} others"
    return f"ranks {', '.join(named[:-1])} and {named[-1]}"


def needs_checkpoint(what: str) -> str:
    """Return the message for what needs booster-checkpoint where it is not installed, such as "Adapters are saved"."""
    return f"{what} by booster-checkpoint, which is not installed. Run `pip install booster-checkpoint`."
