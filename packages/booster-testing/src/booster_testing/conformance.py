"""`PluginConformance`: a test class to inherit for the tests that every plugin must pass, ours or a third party's.

A plugin's test file contains::

    class TestConformance(PluginConformance):
        plugin_class = LocalSGDPlugin
        options = {"every": 2}

The tests depend on the capabilities that the plugin declares; using one that it does not declare must raise a clear
error. The functions that run on ranks are in `booster_testing.conformance_runs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch

from booster_core import Booster
from booster_core.errors import ConfigError, GradientError
from booster_core.plugin import API_VERSION, Capability, Plugin
from booster_testing import conformance_runs as runs
from booster_testing.compare import Tolerance, assert_same_tensors, tolerance_for
from booster_testing.ranks import expect_on_ranks, run_on_ranks
from booster_testing.replicas import assert_equal_replicas
from booster_testing.training import Trained, Training, train_boosted, train_plainly

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ADAPTIVE = Tolerance(
    relative=2e-3,
    reason="an adaptive optimizer divides by a running gradient magnitude: near zero, roundings change a whole step",
)


class PluginConformance:
    """Test what every plugin must do.

    Attributes:
        plugin_class: The plugin under test.
        options: Arguments of its constructor.
        world_size: Number of ranks that train; 1 for a plugin for one process.
    """

    plugin_class: ClassVar[type[Plugin]]
    options: ClassVar[Mapping[str, Any]] = {}
    world_size: ClassVar[int] = 2

    def training(self, **changes: Any) -> Training:
        """Return the training that the ranks run."""
        return Training(plugin_class=self.plugin_class, options=self.options, **changes)

    def needs(self, *capabilities: Capability) -> None:
        """Skip the test if the plugin does not declare all of the capabilities."""
        missing = [c.value for c in capabilities if c not in self.plugin_class.capabilities]
        if missing:
            pytest.skip(f"{self.plugin_class.__name__} does not declare {', '.join(missing)}")

    def assert_parity(self, training: Training) -> list[Trained]:
        """Run a training plainly and boosted, and compare gradients, norms and parameters, each by name."""
        expected = train_plainly(training, self.world_size)
        results = run_on_ranks(train_boosted, self.world_size, training)
        tolerance = tolerance_for(_DTYPES[training.precision or "fp32"])
        for actual in results:
            # Later steps start from parameters that differ by rounding, so only the first step's gradients are
            # compared.
            grads = {name: actual.gradients[0].get(name) for name in expected.gradients[0]}
            assert_same_tensors({n: g for n, g in grads.items() if g is not None}, expected.gradients[0], tolerance)
            if training.max_norm is not None:
                assert actual.norms[0] == pytest.approx(expected.norms[0], rel=tolerance.relative)
            wide = tolerance if training.optimizer == "sgd" or training.precision is not None else _ADAPTIVE
            assert_same_tensors(actual.parameters[-1], expected.parameters[-1], wide)
        return results

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
        run_on_ranks(runs.boost_returns_wrappers, self.world_size, self.training())

    def test_describe_names_plugin_and_precision(self) -> None:
        texts = run_on_ranks(runs.describe, self.world_size, self.training())
        assert all(self.plugin_class.name in text and "compute fp32" in text for text in texts)

    # ---- training

    def test_training_reduces_the_loss(self) -> None:
        results = run_on_ranks(train_boosted, self.world_size, self.training(steps=12))
        for trained in results:
            assert sum(trained.losses[-3:]) < sum(trained.losses[:3])
            assert all(bool(tensor.isfinite().all()) for tensor in trained.parameters[-1].values())

    def test_equal_seeds_give_equal_losses(self) -> None:
        first = run_on_ranks(train_boosted, self.world_size, self.training())
        second = run_on_ranks(train_boosted, self.world_size, self.training())
        assert [trained.losses for trained in first] == [trained.losses for trained in second]

    @pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adafactor", "muon"])
    def test_equals_one_process(self, optimizer: str) -> None:
        self.needs(Capability.SYNCHRONOUS)
        self.assert_parity(self.training(optimizer=optimizer))

    def test_ranks_hold_equal_parameters(self) -> None:
        self.needs(Capability.SYNCHRONOUS)
        assert_equal_replicas(run_on_ranks(runs.train_and_view_locally, self.world_size, self.training()))

    def test_lazy_model_trains_like_an_eager_model(self) -> None:
        eager = run_on_ranks(train_boosted, self.world_size, self.training(steps=2))
        lazy = run_on_ranks(train_boosted, self.world_size, self.training(steps=2, lazy=True))
        for one, other in zip(eager, lazy, strict=True):
            assert one.losses == other.losses
            for name, tensor in one.parameters[-1].items():
                assert torch.equal(other.parameters[-1][name], tensor), name

    def test_frozen_parameters_do_not_change(self) -> None:
        training = self.training(steps=2)
        before = training.make_model().state_dict()
        for trained in run_on_ranks(train_boosted, self.world_size, training):
            assert torch.equal(trained.parameters[-1]["frozen.weight"], before["frozen.weight"])

    @pytest.mark.parametrize("micro_batches", [(2, 2), (3, 1, 2)], ids=["equal", "unequal"])
    def test_accumulation_equals_one_large_batch(self, micro_batches: tuple[int, ...]) -> None:
        self.needs(Capability.SYNCHRONOUS)
        self.assert_parity(self.training(optimizer="sgd", micro_batches=micro_batches))

    def test_no_sync_is_allowed(self) -> None:
        results = run_on_ranks(train_boosted, self.world_size, self.training(micro_batches=(2, 2)))
        assert all(len(trained.losses) == 3 for trained in results)

    @pytest.mark.parametrize("max_norm", [0.05, 100.0])
    def test_clips_by_the_global_norm(self, max_norm: float) -> None:
        self.needs(Capability.SYNCHRONOUS)
        self.assert_parity(self.training(optimizer="sgd", max_norm=max_norm))

    def test_clips_by_value(self) -> None:
        self.needs(Capability.SYNCHRONOUS)
        self.assert_parity(self.training(optimizer="sgd", clip_value=0.01))

    def test_clipping_returns_the_norm(self) -> None:
        for trained in run_on_ranks(train_boosted, self.world_size, self.training(max_norm=1.0)):
            assert all(norm > 0 for norm in trained.norms)

    # ---- precision

    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_low_precision_equals_one_process(self, precision: str) -> None:
        self.needs(Capability(precision), Capability.SYNCHRONOUS)
        self.assert_parity(self.training(optimizer="sgd", precision=precision, max_norm=1.0))

    @pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
    def test_precision_trains_or_raises(self, precision: str) -> None:
        if Capability(precision) in self.plugin_class.capabilities:
            results = run_on_ranks(train_boosted, self.world_size, self.training(precision=precision))
            assert all(torch.tensor(trained.losses).isfinite().all() for trained in results)
        else:
            with pytest.raises(ConfigError, match=f"does not support precision '{precision}'"):
                Booster("cpu", precision, self.plugin_class(**self.options))

    def test_overflow_on_one_rank_skips_the_step_on_all_ranks(self) -> None:
        self.needs(Capability.FP16)
        run_on_ranks(runs.overflow_skips_the_step, self.world_size, self.training(precision="fp16"))

    # ---- optimizer, scheduler, data, hooks

    def test_scheduler_made_before_boost_sets_the_learning_rate(self) -> None:
        run_on_ranks(runs.scheduler_steers, self.world_size, self.training())

    def test_optimizer_state_made_before_boost_is_kept(self) -> None:
        self.needs(Capability.SYNCHRONOUS)
        run_on_ranks(runs.optimizer_state_is_kept, self.world_size, self.training())

    def test_plain_data_loader_is_split_between_ranks(self) -> None:
        self.needs(Capability.DATA_PARALLEL)
        seen = run_on_ranks(runs.samples_of_a_plain_loader, self.world_size, self.training())
        assert sorted(sample for of_rank in seen for sample in of_rank) == list(range(12 * self.world_size))

    def test_after_step_hook_gets_the_metrics(self) -> None:
        run_on_ranks(runs.after_step_hook_sees_metrics, self.world_size, self.training())

    def test_evaluation_needs_no_backward(self) -> None:
        run_on_ranks(runs.evaluates, self.world_size, self.training())

    def test_adapters_train_or_raise(self) -> None:
        pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-runtime[lora]'")
        if Capability.LORA in self.plugin_class.capabilities:
            run_on_ranks(runs.trains_adapters, self.world_size, self.training())
        else:
            expect_on_ranks(
                ConfigError, "does not train adapters", runs.trains_adapters, self.world_size, self.training()
            )

    # ---- user errors: raised on every rank

    def test_boosting_twice_raises(self) -> None:
        expect_on_ranks(ConfigError, "already boosted", runs.boost_twice, self.world_size, self.training())

    def test_optimizer_of_another_model_raises(self) -> None:
        expect_on_ranks(
            ConfigError, "not the model's", runs.boost_with_foreign_optimizer, self.world_size, self.training()
        )

    def test_gradients_from_before_boost_raise(self) -> None:
        expect_on_ranks(
            ConfigError, "gradients from before `boost`", runs.boost_with_gradients, self.world_size, self.training()
        )

    def test_loss_that_is_not_a_scalar_raises(self) -> None:
        expect_on_ranks(GradientError, "scalar", runs.backward_of_a_vector, self.world_size, self.training())

    def test_loss_without_gradient_raises(self) -> None:
        expect_on_ranks(GradientError, "no gradient", runs.backward_without_gradient, self.world_size, self.training())

    @pytest.mark.parametrize("max_norm", [-1.0, float("nan")])
    def test_invalid_max_norm_raises(self, max_norm: float) -> None:
        expect_on_ranks(ConfigError, "max_norm", runs.clip_by, self.world_size, self.training(), max_norm)

    def test_execute_pipeline_without_a_pipeline_raises(self) -> None:
        if Capability.PIPELINE in self.plugin_class.capabilities:
            pytest.skip(f"{self.plugin_class.__name__} has a pipeline")
        expect_on_ranks(ConfigError, "no pipeline", runs.execute_pipeline, self.world_size, self.training())

    def test_two_different_precisions_raise(self) -> None:
        if "precision" in self.options or Capability.BF16 not in self.plugin_class.capabilities:
            pytest.skip("needs a plugin that takes `precision` and supports bf16")
        with pytest.raises(ConfigError, match="asked for twice"):
            Booster("cpu", "fp32", self.plugin_class(**{**self.options, "precision": "bf16"}))

    # ---- checkpoints

    @pytest.mark.parametrize("shard", [False, True], ids=["one-file", "sharded"])
    def test_loaded_run_continues_exactly(self, shard: bool, tmp_path: Any) -> None:  # noqa: FBT001
        self.needs(Capability.SYNCHRONOUS)
        expected = run_on_ranks(runs.train_and_save, self.world_size, self.training(), str(tmp_path), shard)
        actual = run_on_ranks(runs.load_and_train, self.world_size, self.training(), str(tmp_path))
        assert actual == expected

    def test_loads_at_another_world_size(self, tmp_path: Any) -> None:
        self.needs(Capability.SYNCHRONOUS, Capability.DATA_PARALLEL)
        expected = run_on_ranks(runs.train_and_save, self.world_size, self.training(), str(tmp_path), shard=True)
        actual = run_on_ranks(runs.load_and_train, self.world_size + 1, self.training(), str(tmp_path))
        # Losses are per rank; their means over ranks are those of the same global batches.
        for step in range(len(expected[0])):
            means = [sum(losses[step] for losses in run) / len(run) for run in (expected, actual)]
            assert means[1] == pytest.approx(means[0], rel=tolerance_for(torch.float32).relative)
