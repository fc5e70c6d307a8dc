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

from booster_core.errors import ConfigError
from booster_core.plugin import Capability, PipelinePlugin
from booster_testing import pipeline_runs as runs
from booster_testing.compare import Tolerance, assert_same_tensors, tolerance_for
from booster_testing.pipeline_runs import PipelineTraining, train_in_pipeline
from booster_testing.ranks import expect_on_ranks, run_on_ranks
from booster_testing.training import train_plainly

if TYPE_CHECKING:
    from collections.abc import Mapping

    from booster_testing.training import Trained

EXAMPLE_BATCH = {"tokens": torch.zeros(2, 6, dtype=torch.long)}
"""A batch like those that the kit trains with."""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ADAPTIVE = Tolerance(
    relative=2e-3,
    reason="an adaptive optimizer divides by a running gradient magnitude: near zero, roundings change a whole step",
)


def _fails(*_: Any) -> None:
    msg = "the criterion has failed"
    raise ArithmeticError(msg)


def _vector(logits: torch.Tensor, _: Any) -> torch.Tensor:
    return logits.mean((1, 2))


class PipelineConformance:
    """Test what every plugin with a pipeline must do.

    Attributes:
        plugin_class: The plugin under test.
        options: Arguments of its constructor.
        world_size: Number of ranks that train.
        data_size: Number of pipelines among them.
    """

    plugin_class: ClassVar[type[PipelinePlugin]]
    options: ClassVar[Mapping[str, Any]] = {}
    world_size: ClassVar[int] = 2
    data_size: ClassVar[int] = 1

    def training(self, **changes: Any) -> PipelineTraining:
        """Return the training that the ranks run."""
        return PipelineTraining(plugin_class=self.plugin_class, options=self.options, **changes)

    def assert_parity(self, training: PipelineTraining) -> list[Trained]:
        """Run a training plainly and boosted, and compare losses, gradients, norms and parameters."""
        expected = train_plainly(training, self.data_size)
        results = run_on_ranks(train_in_pipeline, self.world_size, training)
        tolerance = tolerance_for(_DTYPES[training.precision or "fp32"])
        wide = tolerance if training.optimizer == "sgd" or training.precision is not None else _ADAPTIVE
        for actual in results:
            # Later steps start from parameters that differ by rounding.
            assert_same_tensors(actual.gradients[0], expected.gradients[0], tolerance)
            assert actual.losses[0] == pytest.approx(expected.losses[0], rel=tolerance.relative)
            if training.max_norm is not None:
                assert actual.norms[0] == pytest.approx(expected.norms[0], rel=tolerance.relative)
            assert_same_tensors(actual.parameters[-1], expected.parameters[-1], wide)
        return results

    # ---- declarations

    def test_declares_its_pipeline(self) -> None:
        assert Capability.PIPELINE in self.plugin_class.capabilities
        assert issubclass(self.plugin_class, PipelinePlugin)

    # ---- training

    @pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
    def test_equals_one_process(self, optimizer: str) -> None:
        self.assert_parity(self.training(optimizer=optimizer))

    @pytest.mark.parametrize("calls", [(4, 4), (5, 2, 3)], ids=["equal", "unequal"])
    def test_accumulates_over_calls(self, calls: tuple[int, ...]) -> None:
        self.assert_parity(self.training(optimizer="sgd", micro_batches=calls))

    @pytest.mark.parametrize("max_norm", [0.05, 100.0])
    def test_clips_by_the_global_norm(self, max_norm: float) -> None:
        self.assert_parity(self.training(optimizer="sgd", max_norm=max_norm))

    def test_clips_by_value(self) -> None:
        self.assert_parity(self.training(optimizer="sgd", clip_value=0.01))

    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_low_precision_equals_one_process(self, precision: str) -> None:
        if Capability(precision) not in self.plugin_class.capabilities:
            pytest.skip(f"{self.plugin_class.__name__} does not declare {precision}")
        self.assert_parity(self.training(optimizer="sgd", precision=precision, max_norm=1.0))

    def test_equal_seeds_give_equal_losses(self) -> None:
        first = run_on_ranks(train_in_pipeline, self.world_size, self.training())
        second = run_on_ranks(train_in_pipeline, self.world_size, self.training())
        assert [trained.losses for trained in first] == [trained.losses for trained in second]

    def test_lazy_model_trains_like_an_eager_model(self) -> None:
        eager = run_on_ranks(train_in_pipeline, self.world_size, self.training(steps=2))
        lazy = run_on_ranks(train_in_pipeline, self.world_size, self.training(steps=2, lazy=True))
        for one, other in zip(eager, lazy, strict=True):
            assert one.losses == other.losses
            for name, tensor in one.parameters[-1].items():
                assert torch.equal(other.parameters[-1][name], tensor), name

    # ---- batches, outputs and evaluation

    def test_takes_one_batch(self) -> None:
        run_on_ranks(runs.takes_one_batch, self.world_size, self.training())

    def test_returns_outputs_where_the_loss_is(self) -> None:
        run_on_ranks(runs.returns_outputs, self.world_size, self.training())

    @pytest.mark.parametrize("how", ["no optimizer", "no_grad"])
    def test_evaluates(self, how: str) -> None:
        run_on_ranks(runs.evaluates, self.world_size, self.training(), how)

    # ---- user errors: raised on every rank

    def test_error_in_the_criterion_is_raised_on_every_rank(self) -> None:
        expect_on_ranks(
            ArithmeticError, "the criterion has failed", runs.criterion_fails, self.world_size, self.training(), _fails
        )

    def test_loss_that_is_not_a_scalar_raises(self) -> None:
        expect_on_ranks(ConfigError, "scalar", runs.criterion_fails, self.world_size, self.training(), _vector)

    def test_model_that_is_not_boosted_raises(self) -> None:
        expect_on_ranks(TypeError, "boost", runs.with_the_users_own_model, self.world_size, self.training())

    def test_end_of_the_data_raises(self) -> None:
        expect_on_ranks(StopIteration, "", runs.without_batches, self.world_size, self.training())

    def test_training_continues_exactly_after_an_error(self) -> None:
        expected = run_on_ranks(train_in_pipeline, self.world_size, self.training(steps=2))
        found = run_on_ranks(runs.goes_on_after_an_error, self.world_size, self.training(), _fails)
        assert found == [trained.losses for trained in expected]

    # ---- checkpoints

    @pytest.mark.parametrize("shard", [False, True], ids=["one-file", "sharded"])
    def test_loaded_run_continues_exactly(self, shard: bool, tmp_path: Any) -> None:  # noqa: FBT001
        expected = run_on_ranks(runs.train_and_save, self.world_size, self.training(), str(tmp_path), shard=shard)
        actual = run_on_ranks(runs.load_and_train, self.world_size, self.training(), str(tmp_path), shard=shard)
        assert actual == expected
