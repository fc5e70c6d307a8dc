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
from booster_runtime.rounding import tolerance_for
from booster_testing import pipeline_runs as runs
from booster_testing.compare import DTYPES, assert_equals_one_process
from booster_testing.pipeline_runs import PipelineTraining, train_in_pipeline
from booster_testing.rank_test_case import RankTestCase
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


class PipelineConformance(RankTestCase):
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

    def assert_parity(self, **changes: Any) -> list[Trained]:
        """Compare a training with one process: losses, gradients, norms and parameters."""
        training = self.training(**changes)
        results: list[Trained] = self.on_ranks(train_in_pipeline, **changes)
        expected = train_plainly(training, self.data_size)
        assert_equals_one_process(results, expected, training, self.data_size, with_state=False)
        tolerance = tolerance_for(DTYPES[training.precision or "fp32"])
        for actual in results:
            assert actual.losses[0] == pytest.approx(expected.losses[0], rel=tolerance.relative)
            assert actual.norms == results[0].norms
        return results

    # ---- declarations

    def test_declares_its_pipeline(self) -> None:
        assert Capability.PIPELINE in self.plugin_class.capabilities
        assert issubclass(self.plugin_class, PipelinePlugin)

    # ---- training

    @pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
    def test_equals_one_process(self, optimizer: str) -> None:
        self.assert_parity(optimizer=optimizer)

    @pytest.mark.parametrize("calls", CALLS)
    def test_accumulates_over_calls(self, calls: str) -> None:
        self.assert_parity(optimizer="sgd", micro_batches=CALLS[calls])

    @pytest.mark.parametrize(("max_norm", "norm_type"), NORMS)
    def test_clips_by_the_global_norm(self, max_norm: float, norm_type: float) -> None:
        self.assert_parity(optimizer="sgd", max_norm=max_norm, norm_type=norm_type)

    def test_clips_by_value(self) -> None:
        self.assert_parity(optimizer="sgd", clip_value=0.01)

    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_low_precision_equals_one_process(self, precision: str) -> None:
        self.needs(Capability(precision))
        self.assert_parity(optimizer="sgd", precision=precision, max_norm=1.0)

    def test_equal_seeds_give_equal_losses(self) -> None:
        first, second = (self.on_ranks(train_in_pipeline, again=again) for again in (False, True))
        assert [trained.losses for trained in first] == [trained.losses for trained in second]

    def test_lazy_model_trains_like_an_eager_model(self) -> None:
        for one, other in zip(
            self.on_ranks(train_in_pipeline), self.on_ranks(train_in_pipeline, lazy=True), strict=True
        ):
            assert one.losses == other.losses
            for name, tensor in one.parameters.items():
                assert torch.equal(other.parameters[name], tensor), name

    # ---- batches, outputs and evaluation

    def test_takes_one_batch(self) -> None:
        self.on_ranks(runs.takes_one_batch)

    def test_returns_outputs_where_the_loss_is(self) -> None:
        self.on_ranks(runs.returns_outputs)

    @pytest.mark.parametrize("how", ["no optimizer", "no_grad"])
    def test_evaluates(self, how: str) -> None:
        self.on_ranks(runs.evaluates, how)

    # ---- user errors: raised on every rank

    def test_error_in_the_criterion_is_raised_on_every_rank(self) -> None:
        self.raises(ArithmeticError, "the criterion has failed", runs.criterion_fails, _fails)

    def test_loss_that_is_not_a_scalar_raises(self) -> None:
        self.raises(ConfigError, "scalar", runs.criterion_fails, _vector)

    def test_model_that_is_not_boosted_raises(self) -> None:
        self.raises(TypeError, "boost", runs.with_the_users_own_model)

    def test_end_of_the_data_raises(self) -> None:
        self.raises(StopIteration, "", runs.without_batches)

    def test_training_continues_exactly_after_an_error(self) -> None:
        expected, found = self.on_ranks(train_in_pipeline), self.on_ranks(runs.goes_on_after_an_error, _fails)
        assert found == [trained.losses[:2] for trained in expected]

    # ---- checkpoints

    @pytest.mark.parametrize("suffix", [".safetensors", ""], ids=["one-file", "sharded"])
    def test_loaded_run_continues_exactly(self, suffix: str, tmp_path: Any) -> None:
        expected = self.call(runs.train_and_save, self.training(), str(tmp_path), suffix)
        actual = self.call(runs.load_and_train, self.training(), str(tmp_path), suffix)
        assert actual == expected
