"""`PipelineConformance`: a test class to inherit for plugins with a pipeline; it tests ``execute_pipeline``.

The options in a plugin's test file must partition the kit's model, `TinyStack`, into stages::

    class TestPipeline(PipelineConformance):
        plugin_class = HybridParallelPlugin
        options = {"pp_size": 2, "custom_policy": ShardingPolicy(layers=("layers",)), "example_batch": EXAMPLE_BATCH}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from booster_core.plugin import Capability, PipelinePlugin
from booster_testing import pipeline_runs as runs
from booster_testing.compare import ADAPTIVE, DTYPES, assert_same_gradients, assert_same_tensors, tolerance_for
from booster_testing.jobs import Job
from booster_testing.pipeline_runs import PipelineTraining, train_in_pipeline
from booster_testing.ranks import run_on_ranks
from booster_testing.shared_jobs import SharedJobs
from booster_testing.training import train_plainly

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from booster_testing.training import Trained

EXAMPLE_BATCH = {"tokens": torch.zeros(2, 6, dtype=torch.long)}
"""A batch like those that the kit trains with."""


def _fails(*_: Any) -> None:
    msg = "the criterion has failed"
    raise ArithmeticError(msg)


def _vector(logits: torch.Tensor, _: Any) -> torch.Tensor:
    return logits.mean((1, 2))


NORMS = ((0.05, 2.0), (0.05, float("inf")), (100.0, 2.0))
"""Largest norms and their types."""
CALLS = {"equal": (4, 4), "unequal": (5, 2, 3)}
"""Batches of the calls of a step."""


def _train(*needs: Capability, **changes: Any) -> Job:
    return Job(function=train_in_pipeline, changes=changes, needs=needs)


JOBS: dict[str, Job] = {
    "adamw": _train(),
    "adamw, again": _train(),
    "adamw, lazy": _train(lazy=True),
    "sgd": _train(optimizer="sgd"),
    **{f"calls, {name}": _train(optimizer="sgd", micro_batches=calls) for name, calls in CALLS.items()},
    **{
        f"norm, {max_norm} {norm_type}": _train(optimizer="sgd", max_norm=max_norm, norm_type=norm_type)
        for max_norm, norm_type in NORMS
    },
    "clip value": _train(optimizer="sgd", clip_value=0.01),
    **{
        f"precision, {name}": _train(Capability(name), optimizer="sgd", precision=name, max_norm=1.0)
        for name in ("bf16", "fp16")
    },
    "one batch": Job(function=runs.takes_one_batch),
    "outputs": Job(function=runs.returns_outputs),
    **{f"evaluation, {how}": Job(function=runs.evaluates, arguments=(how,)) for how in ("no optimizer", "no_grad")},
    "error": Job(function=runs.criterion_fails, arguments=(_fails,), raises=True),
    "after an error": Job(function=runs.goes_on_after_an_error, arguments=(_fails,)),
    "vector": Job(function=runs.criterion_fails, arguments=(_vector,), raises=True),
    "not boosted": Job(function=runs.with_the_users_own_model, raises=True),
    "no batches": Job(function=runs.without_batches, raises=True),
}


class PipelineConformance(SharedJobs):
    """Test what every plugin with a pipeline must do.

    Attributes:
        plugin_class: The plugin under test.
        options: Arguments of its constructor.
        world_size: Number of ranks that train.
        data_size: Number of pipelines among them.
        device: Device type on which the model runs.
        backend: Backend of the process group, as for ``init_process_group``.
        prepare: Called on every rank before the group is opened; write ``staticmethod(function)``.
    """

    plugin_class: ClassVar[type[PipelinePlugin]]
    options: ClassVar[Mapping[str, Any]] = {}
    world_size: ClassVar[int] = 2
    data_size: ClassVar[int] = 1
    device: ClassVar[str] = "cpu"
    backend: ClassVar[str] = "gloo"
    prepare: ClassVar[Callable[[], None] | None] = None

    def training(self, **changes: Any) -> PipelineTraining:
        """Return the training that the ranks run."""
        return PipelineTraining(plugin_class=self.plugin_class, options=self.options, device=self.device, **changes)

    def every_job(self) -> Mapping[str, Job]:
        """Return the jobs of this kit, by name."""
        return JOBS

    def assert_parity(self, name: str) -> list[Trained]:
        """Compare a job's training with one process: losses, gradients, norms and parameters."""
        training = self.training(**JOBS[name].changes)
        results: list[Trained] = self.results_of(name)
        expected = train_plainly(training, self.data_size)
        tolerance = tolerance_for(DTYPES[training.precision or "fp32"])
        wide = tolerance if training.optimizer == "sgd" or training.precision is not None else ADAPTIVE
        for actual in results:
            assert_same_gradients(actual.gradients[:1], expected.gradients[:1], [tolerance], self.data_size)
            assert actual.losses[0] == pytest.approx(expected.losses[0], rel=tolerance.relative)
            if training.max_norm is not None:
                assert actual.norms == results[0].norms
                assert actual.norms[0] == pytest.approx(expected.norms[0], rel=tolerance.relative)
            if tolerance == tolerance_for(torch.float32):  # low precision rounds later steps' parameters otherwise
                tolerances = [tolerance, *[wide] * (len(expected.gradients) - 1)]
                assert_same_gradients(actual.gradients, expected.gradients, tolerances, self.data_size)
            assert_same_tensors(actual.parameters, expected.parameters, wide)
        return results

    # ---- declarations

    def test_declares_its_pipeline(self) -> None:
        assert Capability.PIPELINE in self.plugin_class.capabilities
        assert issubclass(self.plugin_class, PipelinePlugin)

    # ---- training

    @pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
    def test_equals_one_process(self, optimizer: str) -> None:
        self.assert_parity(optimizer)

    @pytest.mark.parametrize("calls", CALLS)
    def test_accumulates_over_calls(self, calls: str) -> None:
        self.assert_parity(f"calls, {calls}")

    @pytest.mark.parametrize(("max_norm", "norm_type"), NORMS)
    def test_clips_by_the_global_norm(self, max_norm: float, norm_type: float) -> None:
        self.assert_parity(f"norm, {max_norm} {norm_type}")

    def test_clips_by_value(self) -> None:
        self.assert_parity("clip value")

    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_low_precision_equals_one_process(self, precision: str) -> None:
        self.needs(Capability(precision))
        self.assert_parity(f"precision, {precision}")

    def test_equal_seeds_give_equal_losses(self) -> None:
        first, second = self.results_of("adamw"), self.results_of("adamw, again")
        assert [trained.losses for trained in first] == [trained.losses for trained in second]

    def test_lazy_model_trains_like_an_eager_model(self) -> None:
        for one, other in zip(self.results_of("adamw"), self.results_of("adamw, lazy"), strict=True):
            assert one.losses == other.losses
            for name, tensor in one.parameters.items():
                assert torch.equal(other.parameters[name], tensor), name

    # ---- batches, outputs and evaluation

    def test_takes_one_batch(self) -> None:
        self.results_of("one batch")

    def test_returns_outputs_where_the_loss_is(self) -> None:
        self.results_of("outputs")

    @pytest.mark.parametrize("how", ["no optimizer", "no_grad"])
    def test_evaluates(self, how: str) -> None:
        self.results_of(f"evaluation, {how}")

    # ---- user errors: raised on every rank

    def test_error_in_the_criterion_is_raised_on_every_rank(self) -> None:
        self.assert_raised(self.results_of("error"), "ArithmeticError", "the criterion has failed")

    def test_loss_that_is_not_a_scalar_raises(self) -> None:
        self.assert_raised(self.results_of("vector"), "ConfigError", "scalar")

    def test_model_that_is_not_boosted_raises(self) -> None:
        self.assert_raised(self.results_of("not boosted"), "TypeError", "boost")

    def test_end_of_the_data_raises(self) -> None:
        self.assert_raised(self.results_of("no batches"), "StopIteration", "")

    def test_training_continues_exactly_after_an_error(self) -> None:
        expected, found = self.results_of("adamw"), self.results_of("after an error")
        assert found == [trained.losses[:2] for trained in expected]

    # ---- checkpoints

    @pytest.mark.parametrize("shard", [False, True], ids=["one-file", "sharded"])
    def test_loaded_run_continues_exactly(self, shard: bool, tmp_path: Any) -> None:  # noqa: FBT001
        settings: dict[str, Any] = {"shard": shard, "backend": self.backend, "prepare": type(self).prepare}
        expected = run_on_ranks(runs.train_and_save, self.world_size, self.training(), str(tmp_path), **settings)
        actual = run_on_ranks(runs.load_and_train, self.world_size, self.training(), str(tmp_path), **settings)
        assert actual == expected
