"""Planning several settings at a time, each in a process of its own: a plan uses one core."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING

import torch

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from booster_tools.planning.ranking import Planned

_MOST_PROCESSES = 8
"""The most by default: a plan of a large model takes about a gigabyte."""

_work: Callable[[int], Planned] | None = None
"""What a process does; it has the user's functions from the fork, as they need not be importable."""


def default_processes() -> int:
    """Return how many plans are made at a time where the user names no number: one for each core, at most eight."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST_PROCESSES)


def in_processes(work: Callable[[int], Planned], number: int, num_processes: int) -> Iterator[Planned]:
    """Yield what became of each setting, as soon as it is known.

    They are planned one after the other in this process where autograd has started threads in it, as for gradients on a
    device: forks don't have them, and torch refuses to compute gradients there.

    Args:
        work: Plans one setting, by its place.
        number: Number of settings.
        num_processes: How many are planned at a time.

    Raises:
        ConfigError: If this system can't fork so many, or a process was ended from outside, as for lack of memory.
    """
    if num_processes < 1 or "fork" not in multiprocessing.get_all_start_methods():
        msg = f"`num_processes={num_processes}` can't be forked here. Use 1 or more where the system can fork, else 1."
        raise ConfigError(msg)
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(num_processes, context, initializer=_begin, initargs=(work,)) as pool:
        try:
            if not pool.submit(_has_autograd).result():
                yield from map(work, range(number))
                return
            for done in as_completed([pool.submit(_planned, place) for place in range(number)]):
                yield done.result()
        except BrokenProcessPool as error:
            msg = "A process that made plans was ended, perhaps for lack of memory. Plan with fewer at a time."
            raise ConfigError(msg) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _begin(work: Callable[[int], Planned]) -> None:
    global _work  # noqa: PLW0603 - of this process alone
    _work = work
    torch.set_num_threads(1)  # threads of OpenMP that the parent has used are gone in a fork, and would be waited for


def _has_autograd() -> bool:
    try:
        torch.ones((), requires_grad=True).clone().backward()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return True


def _planned(place: int) -> Planned:
    assert _work is not None, "a process begins by `_begin`"
    return _work(place)
