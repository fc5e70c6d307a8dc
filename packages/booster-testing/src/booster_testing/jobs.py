"""What the conformance kit runs on ranks: jobs by name, many of them in one call.

Opening a process group takes longer than most jobs, so the jobs of a test class share one. Each starts from the same
random state, whatever ran before.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from booster_core.plugin import Capability
    from booster_testing.training import Training


@dataclass(frozen=True, kw_only=True)
class Job:
    """A function to call on every rank.

    Args:
        function: Called as ``function(training, *arguments)``; at a module's top level.
        changes: Settings of the training that differ from the test class's.
        arguments: Further arguments.
        needs: Capabilities without which the job is not run.
        raises: The function must raise, so that its error is the result; see `Raised`.
    """

    function: Callable[..., Any]
    changes: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[Any, ...] = ()
    needs: tuple[Capability, ...] = ()
    raises: bool = False


@dataclass(frozen=True, kw_only=True)
class Raised:
    """An error that a job raised on a rank.

    Args:
        kinds: Names of its class and of all base classes.
        message: Its text.
    """

    kinds: tuple[str, ...]
    message: str


def run_job(training: Training, job: Job) -> Any:
    """Run a job on this rank and return its result, or the `Raised` error of a job that must raise.

    Collective: every rank of the world.
    """
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the model under test may draw from the global generator
    torch.manual_seed(0)
    changed = replace(training, **job.changes)
    if not job.raises:
        return job.function(changed, *job.arguments)
    try:
        return job.function(changed, *job.arguments)
    except Exception as error:  # noqa: BLE001 - the test says which it should be
        return Raised(kinds=tuple(kind.__name__ for kind in type(error).__mro__), message=str(error))


def run_jobs(training: Training, jobs: Mapping[str, Job]) -> dict[str, Any]:
    """Run jobs one after the other on this rank and return their results by name.

    Collective: every rank of the world.
    """
    return {name: run_job(training, job) for name, job in jobs.items()}
