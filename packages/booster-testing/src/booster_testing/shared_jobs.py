"""Test classes whose tests read the results of jobs that share one call on the ranks."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from booster_testing.jobs import Job, Raised, run_job, run_jobs
from booster_testing.rank_pool import RankError
from booster_testing.ranks import run_on_ranks
from booster_testing.training import Training

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from booster_core.plugin import Capability, Plugin

_TIMEOUT_SECONDS = 300.0


@dataclass
class Results:
    """Each rank's results of the jobs of a test class.

    Attributes:
        by_name: The results that there are.
        are_tried: All jobs were run in one call; after a failure, there are no results of it.
    """

    by_name: dict[str, list[Any]] = field(default_factory=dict)
    are_tried: bool = False


class SharedJobs:
    """Run the jobs of a plugin's test class.

    Attributes:
        shares_calls: Run all jobs of the class in one call, when the first result is needed; else only that one.
        results: What this class's jobs have returned so far.
    """

    plugin_class: ClassVar[type[Plugin]]
    options: ClassVar[Mapping[str, Any]]
    world_size: ClassVar[int]
    device: ClassVar[str]
    backend: ClassVar[str]
    make_model: ClassVar[Callable[[], nn.Module] | None]
    prepare: ClassVar[Callable[[], None] | None]
    shares_calls: ClassVar[bool] = True
    results: ClassVar[Results]

    def training(self, **changes: Any) -> Training:
        """Return the training that the ranks run."""
        settings = {"model_factory": type(self).make_model, "device": self.device, **changes}
        return Training(plugin_class=self.plugin_class, options=self.options, **settings)

    def needs(self, *capabilities: Capability) -> None:
        """Skip the test if the plugin does not declare all of the capabilities."""
        missing = [c.value for c in capabilities if c not in self.plugin_class.capabilities]
        if missing:
            pytest.skip(f"{self.plugin_class.__name__} does not declare {', '.join(missing)}")

    def jobs(self) -> dict[str, Job]:
        """Return the jobs that this plugin can run, by name."""
        declared = self.plugin_class.capabilities
        return {name: job for name, job in self.every_job().items() if declared.issuperset(job.needs)}

    def every_job(self) -> Mapping[str, Job]:
        """Return the jobs of this kit, by name."""
        raise NotImplementedError

    def results_of(self, name: str) -> list[Any]:
        """Return each rank's result of a job; skip the test if this plugin can't run it.

        Raises:
            RankError: If the job failed on some rank.
        """
        wanted = self.jobs()
        if name not in wanted:
            pytest.skip("needs the kit's own model")
        results = self.own_results()
        if self.shares_calls and not results.are_tried:
            results.are_tried = True
            # After a failure each job runs alone, so that the others' tests don't fail with it.
            with contextlib.suppress(RankError):
                by_rank = self.call(run_jobs, wanted)
                results.by_name |= {each: [of_rank[each] for of_rank in by_rank] for each in wanted}
        if name not in results.by_name:
            results.by_name[name] = self.run_alone(wanted[name])
        return results.by_name[name]

    def run_alone(self, job: Job) -> list[Any]:
        """Run one job in a call of its own and return each rank's result."""
        return self.call(run_job, job)

    def call(self, function: Callable[..., Any], *arguments: Any, world_size: int | None = None) -> list[Any]:
        """Call ``function(training, *arguments)`` on every rank and return the results."""
        return run_on_ranks(
            function,
            world_size or self.world_size,
            self.training(),
            *arguments,
            timeout_seconds=_TIMEOUT_SECONDS,
            backend=self.backend,
            prepare=type(self).prepare,
        )

    def assert_raised(self, results: Sequence[Any], kind: str, match: str) -> None:
        """Assert that every rank raised an error of a class, with a message that matches."""
        for rank, result in enumerate(results):
            assert isinstance(result, Raised), f"rank {rank} raised nothing"
            assert kind in result.kinds, f"rank {rank} raised {result.kinds[0]}: {result.message}"
            assert re.search(match, result.message), f"rank {rank} raised {result.kinds[0]}: {result.message}"

    def own_results(self) -> Results:
        """Return the results that this class has so far; a subclass has its own."""
        kit = type(self)
        if "results" not in vars(kit):
            kit.results = Results()
        return kit.results
