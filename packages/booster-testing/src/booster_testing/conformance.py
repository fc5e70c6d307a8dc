"""`PluginConformance`: a test class to inherit for the tests that every plugin must pass, ours or a third party's.

A plugin's test file contains::

    class TestConformance(PluginConformance):
        plugin_class = LocalSGDPlugin
        options = {"every": 2}

A test that needs a capability which the plugin does not declare is skipped; what the API promises of every plugin is
tested always. Most tests call a function of `booster_testing.conformance_runs` on the ranks, whose group stays open for
all tests of a class.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError, GradientError
from booster_core.plugin import API_VERSION, Capability, Plugin
from booster_runtime.rounding import largest_difference, tolerance_for
from booster_testing import conformance_runs as runs
from booster_testing.checkpoint_conformance import CheckpointConformance
from booster_testing.compare import assert_equals_one_process, assert_same_tensors
from booster_testing.models import TinyRouted, TinyStateful
from booster_testing.rank_pool import RankError
from booster_testing.replicas import assert_equal_replicas
from booster_testing.training import Trained, logits_of, tensors_of, train_boosted, train_plainly

PRECISIONS = ("fp32", "bf16", "fp16")
ACCUMULATIONS: dict[str, dict[str, Any]] = {
    "equal": {"micro_batches": (2, 2)},
    "unequal": {"micro_batches": (3, 1, 2)},
    "with a rest": {"micro_batches": (2, 2), "loop": "rest"},
}
"""Settings of trainings that accumulate gradients."""
LOOPS = (
    "two losses",
    "two losses under no_sync",
    "two forwards",
    "one loss of two forwards",
    "evaluation between",
    "dropped gradients",
    "norm between",
    "backward of the loss",
)
"""Other loops of `booster_testing.loops` whose steps must equal those of one process."""
NORMS = ((0.05, 1.0), (0.05, 2.0), (0.05, float("inf")), (100.0, 2.0))
"""Largest norms and their types."""


def stateful_without_dropout() -> TinyStateful:
    """Return the model with running statistics and extra state, whose results can be compared with one process."""
    return TinyStateful(dropout=0.0)


def _low(precision: str) -> dict[str, Any]:
    return {"optimizer": "sgd", "precision": precision, "max_norm": 1.0, "micro_batches": (2, 3)}


class ArithmeticConformance(CheckpointConformance):
    """Test what options of memory and communication can change: values, and on which ranks they are.

    For a variant of a plugin that passes the whole kit with other options.

    Attributes:
        plugin_class: The plugin under test.
        options: Arguments of its constructor.
        world_size: Number of ranks that train; 1 for a plugin for one process.
        other_world_size: Number of ranks on which the checkpoint of ``world_size`` ranks is loaded; ``None`` for one
            rank more.
        device: Device type on which the model runs.
        backend: Backend of the process group, as for ``init_process_group``.
        prepare: Called on every rank before the group is opened, for example to register the device and its backend;
            write ``staticmethod(function)``.
        make_model: Returns the model to train, called without arguments; the kit's own if ``None``. It takes token
            numbers below 16, shape ``(N, T)``, and returns logits of at least 16 classes, or an output that has them as
            ``logits``. A function at a module's top level, or a class; write ``staticmethod(function)``. Tests that
            need features of the kit's models are skipped.
        reduces_under_no_sync: Whether backward communicates as much under ``no_sync`` as outside of it, by design.
    """

    plugin_class: ClassVar[type[Plugin]]
    options: ClassVar[Mapping[str, Any]] = {}
    world_size: ClassVar[int] = 2
    other_world_size: ClassVar[int | None] = None
    device: ClassVar[str] = "cpu"
    backend: ClassVar[str] = "gloo"
    prepare: ClassVar[Callable[[], None] | None] = None
    make_model: ClassVar[Callable[[], nn.Module] | None] = None
    reduces_under_no_sync: ClassVar[bool] = False

    def needs_own_model(self) -> None:
        """Skip the test if the plugin needs a model of its own."""
        if type(self).make_model is not None:
            pytest.skip("needs the kit's own model")

    def assert_parity(self, **changes: Any) -> list[Trained]:
        """Compare a training with one process: gradients, norms, parameters and state, each by name."""
        __tracebackhide__ = True
        results: list[Trained] = self.on_ranks(train_boosted, **changes)
        training = self.training(**changes)
        assert_equals_one_process(results, train_plainly(training, self.world_size), training, self.world_size)
        return results

    def test_boost_makes_ranks_equal_or_raises(self) -> None:
        try:
            results = self.on_ranks(runs.boost_and_view_locally)
        except RankError as error:
            if len(error.exceptions) < self.world_size or not all(
                isinstance(each, ConfigError) for each in error.exceptions.values()
            ):
                raise
            return
        try:
            assert_equal_replicas(results)
        except AssertionError as error:
            msg = f"`boost` leaves each rank its own values, of parameters or buffers: {error}"
            raise AssertionError(msg) from None
        model = self.training().make_model().eval()
        with torch.no_grad():
            expected = logits_of(model(runs.probe(torch.device("cpu"))))
        assert_same_tensors({"outputs": results[-1].outputs}, {"outputs": expected}, tolerance_for(torch.float32))

    @pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adafactor", "muon"])
    def test_equals_one_process(self, optimizer: str) -> None:
        self.needs(Capability.SYNCHRONOUS)
        self.assert_parity(optimizer=optimizer)

    def test_ranks_hold_equal_parameters(self) -> None:
        self.needs(Capability.SYNCHRONOUS)
        assert_equal_replicas(self.on_ranks(runs.train_and_view_locally))

    def test_lazy_model_trains_like_an_eager_model(self) -> None:
        self.needs(Capability.LAZY_INIT)
        for one, other in zip(self.on_ranks(train_boosted), self.on_ranks(train_boosted, lazy=True), strict=True):
            assert one.losses == other.losses
            for name, tensor in one.parameters.items():
                assert torch.equal(other.parameters[name], tensor), name

    @pytest.mark.parametrize("micro_batches", ["unequal"])
    def test_accumulation_equals_one_large_batch(self, micro_batches: str) -> None:
        self.needs(Capability.SYNCHRONOUS)
        self.assert_parity(optimizer="sgd", **ACCUMULATIONS[micro_batches])

    @pytest.mark.parametrize("loop", ["two losses under no_sync", "evaluation between"])
    def test_loop_equals_one_process(self, loop: str) -> None:
        self.needs(Capability.SYNCHRONOUS)
        self.assert_parity(optimizer="sgd", micro_batches=(2, 3), loop=loop)

    @pytest.mark.parametrize(("max_norm", "norm_type"), [(0.05, 1.0), (0.05, 2.0)])
    def test_clips_by_the_global_norm(self, max_norm: float, norm_type: float) -> None:
        self.needs(Capability.SYNCHRONOUS)
        self.assert_parity(optimizer="sgd", max_norm=max_norm, norm_type=norm_type)

    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_low_precision_equals_one_process(self, precision: str) -> None:
        self.needs(Capability(precision), Capability.SYNCHRONOUS)
        self.assert_parity(**_low(precision))

    def test_overflow_on_one_rank_skips_the_step_on_all_ranks(self) -> None:
        self.needs(Capability.FP16)
        self.on_ranks(runs.overflow_skips_the_step, precision="fp16")


class PluginConformance(ArithmeticConformance):
    """Test what every plugin must do; attributes as for `ArithmeticConformance`."""

    # ---- declarations

    def test_declares_name_version_and_capabilities(self) -> None:
        assert self.plugin_class.name
        assert self.plugin_class.name == self.plugin_class.name.strip()
        assert self.plugin_class.api_version == API_VERSION
        assert all(isinstance(capability, Capability) for capability in self.plugin_class.capabilities)

    def test_can_be_constructed_without_a_process_group(self) -> None:
        assert not torch.distributed.is_initialized()
        plugin = self.plugin_class(**self.options)
        assert isinstance(plugin.describe(), Mapping)

    def test_boost_returns_wrappers_around_the_users_objects(self) -> None:
        self.on_ranks(runs.boost_returns_wrappers)

    def test_describe_names_plugin_and_precision(self) -> None:
        texts = self.on_ranks(runs.describe)
        assert all(self.plugin_class.name in text and "compute fp32" in text for text in texts)

    # ---- training

    def test_training_reduces_the_loss(self) -> None:
        for trained in self.on_ranks(train_boosted, steps=12):
            assert sum(trained.losses[-3:]) < sum(trained.losses[:3])
            assert all(bool(tensor.isfinite().all()) for tensor in trained.parameters.values())

    def test_equal_seeds_give_equal_losses(self) -> None:
        first, second = (self.on_ranks(train_boosted, again=again) for again in (False, True))
        assert [trained.losses for trained in first] == [trained.losses for trained in second]

    def test_equal_seeds_give_equal_dropout(self) -> None:
        self.needs_own_model()
        first, second = (self.on_ranks(train_boosted, model_factory=TinyStateful, again=it) for it in (False, True))
        assert [trained.losses for trained in first] == [trained.losses for trained in second]

    def test_model_with_running_statistics_equals_one_process(self) -> None:
        self.needs(Capability.SYNCHRONOUS)
        self.needs_own_model()
        self.assert_parity(model_factory=stateful_without_dropout, optimizer="sgd", same_batches=True)

    def test_parameters_used_on_some_ranks_equal_one_process(self) -> None:
        self.needs(Capability.SYNCHRONOUS)
        self.needs_own_model()
        self.assert_parity(model_factory=TinyRouted, optimizer="sgd", routed=True)

    def test_frozen_parameters_do_not_change(self) -> None:
        model = self.training().make_model()
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        before = tensors_of(model.state_dict())
        for trained in self.on_ranks(train_boosted):
            assert [name for name in frozen if not torch.equal(trained.parameters[name], before[name])] == []

    @pytest.mark.parametrize("micro_batches", ACCUMULATIONS)
    def test_accumulation_equals_one_large_batch(self, micro_batches: str) -> None:
        super().test_accumulation_equals_one_large_batch(micro_batches)

    @pytest.mark.parametrize("loop", LOOPS)
    def test_loop_equals_one_process(self, loop: str) -> None:
        super().test_loop_equals_one_process(loop)

    def test_zeroed_gradients_equal_one_process(self) -> None:
        self.needs(Capability.SYNCHRONOUS)
        self.assert_parity(optimizer="sgd", set_to_none=False)

    def test_no_sync_is_allowed(self) -> None:
        results = self.on_ranks(train_boosted, optimizer="sgd", **ACCUMULATIONS["equal"])
        assert all(len(trained.losses) == 3 for trained in results)

    def test_no_sync_saves_the_communication_of_its_model(self) -> None:
        self.needs(Capability.SYNCHRONOUS)
        if self.plugin_class.no_sync is Plugin.no_sync or self.reduces_under_no_sync:
            pytest.skip(f"{self.plugin_class.__name__} does not save communication under no_sync")
        for counts in self.on_ranks(runs.traffic_of_backward):
            assert counts["inside"] < counts["outside"] or counts["outside"] == 0, counts
            assert counts["other model"] >= counts["outside"], counts

    def test_old_graph_raises_or_gives_right_gradients(self) -> None:
        self.needs(Capability.SYNCHRONOUS)
        outcomes = set(self.on_ranks(runs.backward_through_an_old_graph, optimizer="sgd"))
        assert len(outcomes) == 1, "some ranks raise, and others do not"

    # ---- clipping

    @pytest.mark.parametrize(("max_norm", "norm_type"), NORMS)
    def test_clips_by_the_global_norm(self, max_norm: float, norm_type: float) -> None:
        super().test_clips_by_the_global_norm(max_norm, norm_type)

    @pytest.mark.parametrize(("max_norm", "norm_type"), NORMS)
    def test_norm_is_the_same_on_every_rank(self, max_norm: float, norm_type: float) -> None:
        results = self.on_ranks(train_boosted, optimizer="sgd", max_norm=max_norm, norm_type=norm_type)
        norms = [trained.norms for trained in results]
        assert all(norm > 0 for norm in norms[0]), norms
        assert all(of_rank == norms[0] for of_rank in norms), f"norms differ between ranks: {norms}"

    def test_clips_by_value(self) -> None:
        self.needs(Capability.SYNCHRONOUS)
        self.assert_parity(optimizer="sgd", clip_value=0.01)

    def test_infinite_norm_is_returned_on_every_rank(self) -> None:
        norms = self.on_ranks(runs.clip_an_infinite_gradient)
        assert not any(torch.tensor(norm).isfinite() for norm in norms)

    def test_infinite_norm_raises_on_every_rank_if_asked(self) -> None:
        self.raises(GradientError, "error_if_nonfinite", runs.clip_an_infinite_gradient_strictly)

    # ---- precision

    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_low_precision_is_computed_in(self, precision: str) -> None:
        self.needs(Capability(precision), Capability.FP32)
        low, high = (self.on_ranks(train_boosted, **_low(name))[0].gradients[0] for name in (precision, "fp32"))
        tolerance = tolerance_for(torch.float32).relative
        same = [name for name, grad in high.items() if largest_difference(low[name], grad) <= tolerance]
        assert not same, f"gradients are those of fp32: {same}"

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_precision_trains_or_raises(self, precision: str) -> None:
        if Capability(precision) in self.plugin_class.capabilities:
            results = self.on_ranks(train_boosted, **_low(precision))
            assert all(torch.tensor(trained.losses).isfinite().all() for trained in results)
        else:
            with pytest.raises(ConfigError, match=f"does not support precision '{precision}'"):
                Booster(self.device, precision, self.plugin_class(**self.options))

    # ---- checkpoints

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_resumed_run_continues_exactly(self, precision: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        super().test_resumed_run_continues_exactly(precision, tmp_path_factory)

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_checkpoint_loads_on_one_device(self, precision: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        super().test_checkpoint_loads_on_one_device(precision, tmp_path_factory)

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_checkpoint_of_one_device_loads(self, precision: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        super().test_checkpoint_of_one_device_loads(precision, tmp_path_factory)

    # ---- optimizer, scheduler, data, hooks

    def test_scheduler_made_before_boost_sets_the_learning_rate(self) -> None:
        self.on_ranks(runs.scheduler_steers)

    def test_optimizer_state_made_before_boost_is_kept(self) -> None:
        self.needs(Capability.SYNCHRONOUS)
        self.on_ranks(runs.optimizer_state_is_kept)

    def test_plain_data_loader_is_split_between_ranks(self) -> None:
        self.needs(Capability.DATA_PARALLEL)
        seen = Counter(sample for of_rank in self.on_ranks(runs.samples_of_a_plain_loader) for sample in of_rank)
        counts = [seen[sample] for sample in range(12 * self.world_size)]
        assert set(counts) == {1}, (
            f"ranks get samples 0, 1, ... {counts} times: the loader is not split by the place that "
            "`data_parallel_coordinates` gives each rank"
        )

    def test_after_step_hook_gets_the_metrics(self) -> None:
        self.on_ranks(runs.after_step_hook_sees_metrics)

    def test_evaluation_changes_nothing(self) -> None:
        self.on_ranks(runs.evaluates)

    def test_adapters_train_or_raise(self) -> None:
        pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-runtime[lora]'")
        if type(self).make_model is not None:
            pytest.skip("names layers of the kit's own model")
        if Capability.LORA in self.plugin_class.capabilities:
            self.on_ranks(runs.trains_adapters)
        else:
            self.raises(ConfigError, "does not train adapters", runs.trains_adapters)

    # ---- user errors: raised on every rank

    def test_boosting_twice_raises(self) -> None:
        self.raises(ConfigError, "already boosted", runs.boost_twice)

    def test_optimizer_of_another_model_raises(self) -> None:
        self.raises(ConfigError, "not the model's", runs.boost_with_foreign_optimizer)

    def test_gradients_from_before_boost_raise(self) -> None:
        self.raises(ConfigError, "gradients from before `boost`", runs.boost_with_gradients)

    def test_loss_that_is_not_a_scalar_raises(self) -> None:
        self.raises(GradientError, "scalar", runs.backward_of_a_vector)

    def test_loss_without_gradient_raises(self) -> None:
        self.raises(GradientError, "no gradient", runs.backward_without_gradient)

    @pytest.mark.parametrize("max_norm", [-1.0, float("nan")])
    def test_invalid_max_norm_raises(self, max_norm: float) -> None:
        self.raises(ConfigError, "max_norm", runs.clip_by, max_norm)

    def test_execute_pipeline_without_a_pipeline_raises(self) -> None:
        if Capability.PIPELINE in self.plugin_class.capabilities:
            pytest.skip(f"{self.plugin_class.__name__} has a pipeline")
        self.raises(ConfigError, "no pipeline", runs.execute_pipeline)

    def test_two_different_precisions_raise(self) -> None:
        accepted = inspect.signature(self.plugin_class).parameters
        is_asked_for = "precision" in self.options or "precision" not in accepted
        if is_asked_for or Capability.BF16 not in self.plugin_class.capabilities:
            pytest.skip("needs a plugin whose constructor takes `precision`, and bf16")
        with pytest.raises(ConfigError, match="asked for twice"):
            Booster(self.device, "fp32", self.plugin_class(**{**self.options, "precision": "bf16"}))
