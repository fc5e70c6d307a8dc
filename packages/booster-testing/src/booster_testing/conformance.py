"""`PluginConformance`: a test class to inherit for the tests that every plugin must pass, ours or a third party's.

A plugin's test file contains::

    class TestConformance(PluginConformance):
        plugin_class = LocalSGDPlugin
        options = {"every": 2}

A test that needs a capability which the plugin does not declare is skipped; what the API promises of every plugin is
tested always. Most tests read the result of a job of `booster_testing.conformance_jobs`; all jobs of a class run in one
call on the ranks, when the first result is needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_core.plugin import API_VERSION, Capability, Plugin
from booster_testing import conformance_jobs as jobs
from booster_testing.checkpoint_conformance import CheckpointConformance
from booster_testing.compare import (
    ADAPTIVE,
    DTYPES,
    assert_same_gradients,
    assert_same_tensors,
    largest_difference,
    tolerance_for,
)
from booster_testing.conformance_runs import probe
from booster_testing.jobs import Job, Raised
from booster_testing.replicas import assert_equal_replicas
from booster_testing.training import Trained, logits_of, tensors_of, train_plainly

PRECISIONS = ("fp32", "bf16", "fp16")


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

    def every_job(self) -> Mapping[str, Job]:
        """Return the jobs of this kit, by name."""
        return jobs.JOBS if type(self).make_model is not None else {**jobs.JOBS, **jobs.OWN_MODEL_JOBS}

    def assert_parity(self, name: str) -> list[Trained]:
        """Compare a job's training with one process: gradients, norms, parameters and state, each by name."""
        results: list[Trained] = self.results_of(name)
        training = self.training(**self.jobs()[name].changes)
        expected = train_plainly(training, self.world_size)
        tolerance = tolerance_for(DTYPES[training.precision or "fp32"])
        wide = tolerance if training.optimizer == "sgd" or training.precision is not None else ADAPTIVE
        for actual in results:
            assert_same_gradients(actual.gradients[:1], expected.gradients[:1], [tolerance], self.world_size)
            if training.max_norm is not None:
                assert actual.norms[0] == pytest.approx(expected.norms[0], rel=tolerance.relative)
            if tolerance == tolerance_for(torch.float32):  # low precision rounds later steps' parameters otherwise
                tolerances = [tolerance, *[wide] * (len(expected.gradients) - 1)]
                assert_same_gradients(actual.gradients, expected.gradients, tolerances, self.world_size)
            assert_same_tensors(actual.parameters, expected.parameters, wide)
            state = {key: actual.state[key] for key in expected.state if key in actual.state}
            assert_same_tensors(state, expected.state, wide)
        return results

    def test_boost_makes_ranks_equal_or_raises(self) -> None:
        results = self.results_of("start")
        if any(isinstance(result, Raised) for result in results):
            self.assert_raised(results, "ConfigError", "")
            return
        assert_equal_replicas(results)
        model = self.training().make_model().eval()
        with torch.no_grad():
            expected = logits_of(model(probe(torch.device("cpu"))))
        assert_same_tensors({"outputs": results[-1].outputs}, {"outputs": expected}, tolerance_for(torch.float32))

    @pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adafactor", "muon"])
    def test_equals_one_process(self, optimizer: str) -> None:
        self.needs(Capability.SYNCHRONOUS)
        self.assert_parity(optimizer)

    def test_ranks_hold_equal_parameters(self) -> None:
        self.needs(Capability.SYNCHRONOUS)
        assert_equal_replicas(self.results_of("replicas"))

    def test_lazy_model_trains_like_an_eager_model(self) -> None:
        self.needs(Capability.LAZY_INIT)
        for one, other in zip(self.results_of("adamw"), self.results_of("adamw, lazy"), strict=True):
            assert one.losses == other.losses
            for name, tensor in one.parameters.items():
                assert torch.equal(other.parameters[name], tensor), name

    @pytest.mark.parametrize("micro_batches", ["unequal"])
    def test_accumulation_equals_one_large_batch(self, micro_batches: str) -> None:
        self.needs(Capability.SYNCHRONOUS)
        self.assert_parity(f"accumulation, {micro_batches}")

    @pytest.mark.parametrize("loop", ["two losses under no_sync", "evaluation between"])
    def test_loop_equals_one_process(self, loop: str) -> None:
        self.needs(Capability.SYNCHRONOUS)
        self.assert_parity(f"loop, {loop}")

    @pytest.mark.parametrize(("max_norm", "norm_type"), [(0.05, 1.0), (0.05, 2.0)])
    def test_clips_by_the_global_norm(self, max_norm: float, norm_type: float) -> None:
        self.needs(Capability.SYNCHRONOUS)
        self.assert_parity(f"norm, {max_norm} {norm_type}")

    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_low_precision_equals_one_process(self, precision: str) -> None:
        self.needs(Capability(precision), Capability.SYNCHRONOUS)
        self.assert_parity(f"precision, {precision}")

    def test_overflow_on_one_rank_skips_the_step_on_all_ranks(self) -> None:
        self.needs(Capability.FP16)
        self.results_of("overflow")


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
        self.results_of("boost")

    def test_describe_names_plugin_and_precision(self) -> None:
        texts = self.results_of("describe")
        assert all(self.plugin_class.name in text and "compute fp32" in text for text in texts)

    # ---- training

    def test_training_reduces_the_loss(self) -> None:
        for trained in self.results_of("adamw, many steps"):
            assert sum(trained.losses[-3:]) < sum(trained.losses[:3])
            assert all(bool(tensor.isfinite().all()) for tensor in trained.parameters.values())

    def test_equal_seeds_give_equal_losses(self) -> None:
        first, second = self.results_of("adamw"), self.results_of("adamw, again")
        assert [trained.losses for trained in first] == [trained.losses for trained in second]

    def test_equal_seeds_give_equal_dropout(self) -> None:
        first, second = self.results_of("dropout"), self.results_of("dropout, again")
        assert [trained.losses for trained in first] == [trained.losses for trained in second]

    def test_model_with_running_statistics_equals_one_process(self) -> None:
        self.needs(Capability.SYNCHRONOUS)
        self.assert_parity("running statistics")

    def test_parameters_used_on_some_ranks_equal_one_process(self) -> None:
        self.needs(Capability.SYNCHRONOUS)
        self.assert_parity("used on some ranks")

    def test_frozen_parameters_do_not_change(self) -> None:
        model = self.training().make_model()
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        before = tensors_of(model.state_dict())
        for trained in self.results_of("adamw"):
            assert [name for name in frozen if not torch.equal(trained.parameters[name], before[name])] == []

    @pytest.mark.parametrize("micro_batches", jobs.ACCUMULATIONS)
    def test_accumulation_equals_one_large_batch(self, micro_batches: str) -> None:
        super().test_accumulation_equals_one_large_batch(micro_batches)

    @pytest.mark.parametrize("loop", jobs.LOOPS)
    def test_loop_equals_one_process(self, loop: str) -> None:
        super().test_loop_equals_one_process(loop)

    def test_zeroed_gradients_equal_one_process(self) -> None:
        self.needs(Capability.SYNCHRONOUS)
        self.assert_parity("zeroed gradients")

    def test_no_sync_is_allowed(self) -> None:
        assert all(len(trained.losses) == 3 for trained in self.results_of("accumulation, equal"))

    def test_no_sync_saves_the_communication_of_its_model(self) -> None:
        self.needs(Capability.SYNCHRONOUS)
        if self.plugin_class.no_sync is Plugin.no_sync or self.reduces_under_no_sync:
            pytest.skip(f"{self.plugin_class.__name__} does not save communication under no_sync")
        for counts in self.results_of("traffic"):
            assert counts["inside"] < counts["outside"] or counts["outside"] == 0, counts
            assert counts["other model"] >= counts["outside"], counts

    def test_old_graph_raises_or_gives_right_gradients(self) -> None:
        self.needs(Capability.SYNCHRONOUS)
        outcomes = set(self.results_of("old graph"))
        assert len(outcomes) == 1, "some ranks raise, and others do not"

    # ---- clipping

    @pytest.mark.parametrize(("max_norm", "norm_type"), jobs.NORMS)
    def test_clips_by_the_global_norm(self, max_norm: float, norm_type: float) -> None:
        super().test_clips_by_the_global_norm(max_norm, norm_type)

    @pytest.mark.parametrize(("max_norm", "norm_type"), jobs.NORMS)
    def test_norm_is_the_same_on_every_rank(self, max_norm: float, norm_type: float) -> None:
        norms = [trained.norms for trained in self.results_of(f"norm, {max_norm} {norm_type}")]
        assert all(norm > 0 for norm in norms[0]), norms
        assert all(of_rank == norms[0] for of_rank in norms), f"norms differ between ranks: {norms}"

    def test_clips_by_value(self) -> None:
        self.needs(Capability.SYNCHRONOUS)
        self.assert_parity("clip value")

    def test_infinite_norm_is_returned_on_every_rank(self) -> None:
        assert not any(torch.tensor(norm).isfinite() for norm in self.results_of("nonfinite"))

    def test_infinite_norm_raises_on_every_rank_if_asked(self) -> None:
        self.assert_raised(self.results_of("nonfinite, error"), "GradientError", "error_if_nonfinite")

    # ---- precision

    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_low_precision_is_computed_in(self, precision: str) -> None:
        self.needs(Capability(precision), Capability.FP32)
        low, high = (self.results_of(f"precision, {name}")[0].gradients[0] for name in (precision, "fp32"))
        tolerance = tolerance_for(torch.float32).relative
        same = [name for name, grad in high.items() if largest_difference(low[name], grad) <= tolerance]
        assert not same, f"gradients are those of fp32: {same}"

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_precision_trains_or_raises(self, precision: str) -> None:
        if Capability(precision) in self.plugin_class.capabilities:
            results = self.results_of(f"precision, {precision}")
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
        self.results_of("scheduler")

    def test_optimizer_state_made_before_boost_is_kept(self) -> None:
        self.needs(Capability.SYNCHRONOUS)
        self.results_of("optimizer state")

    def test_plain_data_loader_is_split_between_ranks(self) -> None:
        self.needs(Capability.DATA_PARALLEL)
        seen = self.results_of("loader")
        assert sorted(sample for of_rank in seen for sample in of_rank) == list(range(12 * self.world_size))

    def test_after_step_hook_gets_the_metrics(self) -> None:
        self.results_of("after_step")

    def test_evaluation_changes_nothing(self) -> None:
        self.results_of("evaluation")

    def test_adapters_train_or_raise(self) -> None:
        pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-runtime[lora]'")
        if type(self).make_model is not None:
            pytest.skip("names layers of the kit's own model")
        if Capability.LORA in self.plugin_class.capabilities:
            self.run_alone(jobs.ADAPTERS)
        else:
            self.assert_raised(self.run_alone(jobs.ADAPTERS_REFUSED), "ConfigError", "does not train adapters")

    # ---- user errors: raised on every rank

    def test_boosting_twice_raises(self) -> None:
        self.assert_raised(self.results_of("boost twice"), "ConfigError", "already boosted")

    def test_optimizer_of_another_model_raises(self) -> None:
        self.assert_raised(self.results_of("foreign optimizer"), "ConfigError", "not the model's")

    def test_gradients_from_before_boost_raise(self) -> None:
        results = self.results_of("gradients before boost")
        self.assert_raised(results, "ConfigError", "gradients from before `boost`")

    def test_loss_that_is_not_a_scalar_raises(self) -> None:
        self.assert_raised(self.results_of("vector"), "GradientError", "scalar")

    def test_loss_without_gradient_raises(self) -> None:
        self.assert_raised(self.results_of("no gradient"), "GradientError", "no gradient")

    @pytest.mark.parametrize("max_norm", [-1.0, float("nan")])
    def test_invalid_max_norm_raises(self, max_norm: float) -> None:
        self.assert_raised(self.results_of(f"max_norm {max_norm}"), "ConfigError", "max_norm")

    def test_execute_pipeline_without_a_pipeline_raises(self) -> None:
        if Capability.PIPELINE in self.plugin_class.capabilities:
            pytest.skip(f"{self.plugin_class.__name__} has a pipeline")
        self.assert_raised(self.results_of("execute_pipeline"), "ConfigError", "no pipeline")

    def test_two_different_precisions_raise(self) -> None:
        accepted = inspect.signature(self.plugin_class).parameters
        is_asked_for = "precision" in self.options or "precision" not in accepted
        if is_asked_for or Capability.BF16 not in self.plugin_class.capabilities:
            pytest.skip("needs a plugin whose constructor takes `precision`, and bf16")
        with pytest.raises(ConfigError, match="asked for twice"):
            Booster(self.device, "fp32", self.plugin_class(**{**self.options, "precision": "bf16"}))
