"""The conformance kit finds every mutant, by the test whose name says what is wrong."""

import inspect
from functools import partial

import pytest
from faulty_plugins import FAULTY
from kit_cases import by_default, slow_cases
from reference_plugins import ReferencePipelinePlugin, ReferencePlugin

from booster_testing import RankError, functions
from booster_testing.conformance import PluginConformance
from booster_testing.functions import (
    test_clips_by_value,
    test_describe_names_plugin_and_precision,
    test_invalid_max_norm_raises,
)
from booster_testing.pipeline_conformance import PipelineConformance

DRIFT = r"differ between ranks: .*embedding\.weight.* \(ranks 0 and 1\)"
DIFFER = "tensors differ by more than"
FOUND = [
    ("StartsApart", "test_boost_makes_ranks_equal_or_raises", {}, "`boost` leaves each rank its own"),
    ("ChangesWeightsInEvaluation", "test_evaluation_changes_nothing", {}, r"the evaluation changed \['embedding"),
    ("UntiesWeights", "test_equals_one_process", {"optimizer": "sgd"}, "not the model's|Only in|" + DIFFER),
    ("IgnoresGroups", "test_equals_one_process", {"optimizer": "sgd"}, DIFFER),
    ("OtherBeta2", "test_equals_one_process", {"optimizer": "adamw"}, DIFFER),
    (
        "SumsGradients",
        "test_equals_one_process",
        {"optimizer": "sgd"},
        r"step 1: .* summed .*, not averaged: factor 2\.00",
    ),
    (
        "FlattensPresentGradients",
        "test_parameters_used_on_some_ranks_equal_one_process",
        {},
        r"A rank has no gradient of (first|other): .* brings zeros",
    ),
    ("WithoutAveraging", "test_ranks_hold_equal_parameters", {}, DRIFT),
    ("OffByOneRounding", "test_ranks_hold_equal_parameters", {}, DRIFT),
    ("OffByOneRoundingOutsideOfShards", "test_ranks_hold_equal_parameters", {}, "Ranks 0 and 1 compute different"),
    ("SameSamples", "test_plain_data_loader_is_split_between_ranks", {}, r"\[2, 2, .* times: the loader is not split"),
    ("KeepsLastMicroBatch", "test_accumulation_equals_one_large_batch", {"micro_batches": "unequal"}, DIFFER),
    ("AveragesNoMoreAfterEvaluation", "test_loop_equals_one_process", {"loop": "evaluation between"}, DIFFER),
    ("HasNoEffectOfZeroGrad", "test_zeroed_gradients_equal_one_process", {}, "step 2: .* not reset"),
    ("SyncsUnderNoSync", "test_no_sync_saves_the_communication_of_its_model", {}, "inside"),
    ("NormOfOwnPart", "test_norm_is_the_same_on_every_rank", {"max_norm": 0.05, "norm_type": 2.0}, "differ between"),
    (
        "IgnoresNormType",
        "test_clips_by_the_global_norm",
        {"max_norm": 0.05, "norm_type": 1.0},
        "gradient norm of step 1 by",
    ),
    ("IgnoresErrorIfNonfinite", "test_infinite_norm_raises_on_every_rank_if_asked", {}, "rank 0 raised nothing"),
    ("DecidesOverflowLocally", "test_overflow_on_one_rank_skips_the_step_on_all_ranks", {}, "the scale falls"),
    ("ComputesInFP32", "test_low_precision_is_computed_in", {"precision": "bf16"}, "gradients are those of fp32"),
    ("WithoutAveraging", "test_a_file_holds_what_every_rank_holds", {}, "A save would write a mixture: .*weight"),
    ("ForgetsMasters", "test_resumed_run_continues_exactly", {"precision": "bf16"}, DIFFER),
    ("IgnoresSavedLearningRate", "test_resumed_run_continues_exactly", {"precision": "fp32"}, r"'lr': 0.07"),
    ("SwapsMoments", "test_checkpoint_loads_on_one_device", {"precision": "fp32"}, DIFFER),
    ("ForgetsBuffers", "test_resumed_run_continues_exactly", {"precision": "fp32"}, DIFFER),
    ("ForgetsExtraState", "test_resumed_run_continues_exactly", {"precision": "fp32"}, "counter._extra_state"),
]
FOUND_IN_PIPELINES = [
    ("DropsLastMicrobatch", "test_equals_one_process", {"optimizer": "sgd"}, DIFFER),
    ("TakesOneBatchAhead", "test_takes_one_batch", {}, r"\[0, 1\]"),
    ("ReversesOutputs", "test_returns_outputs_where_the_loss_is", {}, "Tensor-likes are not close"),
]


@pytest.mark.parametrize(("mutant", "test", "arguments", "message"), FOUND, ids=[case[0] for case in FOUND])
def test_mutant_fails_the_test_of_its_fault(mutant, test, arguments, message, tmp_path_factory):
    members = {"plugin_class": FAULTY[mutant]}
    run = getattr(type("Kit", (PluginConformance,), members)(), test)
    if "tmp_path_factory" in inspect.signature(run).parameters:
        arguments = {**arguments, "tmp_path_factory": tmp_path_factory}
    with pytest.raises((AssertionError, RankError, pytest.fail.Exception), match=message):
        run(**arguments)


WITHOUT_MUTANT = (
    "test_boost_returns_wrappers_around_the_users_objects",
    "test_describe_names_plugin_and_precision",
    "test_scheduler_made_before_boost_sets_the_learning_rate",
    "test_optimizer_state_made_before_boost_is_kept",
    "test_old_graph_raises_or_gives_right_gradients",
    "test_after_step_hook_gets_the_metrics",
    "test_infinite_norm_is_returned_on_every_rank",
    "test_checkpoint_of_one_device_loads[bf16]",
    "test_loads_at_another_world_size",
    "test_boosting_twice_raises",
    "test_optimizer_of_another_model_raises",
    "test_gradients_from_before_boost_raise",
    "test_loss_that_is_not_a_scalar_raises",
    "test_loss_without_gradient_raises",
    "test_invalid_max_norm_raises[nan]",
    "test_execute_pipeline_without_a_pipeline_raises",
    "test_two_different_precisions_raise",
)
"""Further tests that a correct plugin has to pass."""


@slow_cases("test_resumed_run_continues_exactly[bf16]", "test_resumed_run_continues_exactly[fp16]")
@by_default(*sorted({case[1] for case in FOUND}), *WITHOUT_MUTANT)
class TestReference(PluginConformance):
    """The plugin that the mutants are made from passes, so what a mutant fails is its own fault."""

    plugin_class = ReferencePlugin


@pytest.mark.parametrize(
    ("mutant", "test", "arguments", "message"), FOUND_IN_PIPELINES, ids=[case[0] for case in FOUND_IN_PIPELINES]
)
def test_mutant_with_a_pipeline_fails_the_test_of_its_fault(mutant, test, arguments, message):
    members = {"plugin_class": FAULTY[mutant], "data_size": 2}
    run = getattr(type("Kit", (PipelineConformance,), members)(), test)
    with pytest.raises((AssertionError, RankError), match=message):
        run(**arguments)


class TestReferencePipeline(PipelineConformance):
    """The plugin that those mutants are made from passes."""

    plugin_class = ReferencePipelinePlugin
    data_size = 2


def test_every_mutant_is_listed():
    listed = {case[0] for case in (*FOUND, *FOUND_IN_PIPELINES)}
    assert listed == FAULTY.keys()


# ---- the kit's tests as functions, run with what the fixture ``plugin`` says

__all__ = ["test_clips_by_value", "test_describe_names_plugin_and_precision", "test_invalid_max_norm_raises"]


@pytest.fixture
def plugin():
    return partial(ReferencePlugin)


def test_every_test_of_the_class_is_a_function():
    assert {name for name in dir(PluginConformance) if name.startswith("test_")} == set(functions.__all__)


def test_a_fault_is_found_by_the_function_and_told_first():
    with pytest.raises(AssertionError, match=r"summed .*, not averaged"):
        functions.test_equals_one_process(plugin=FAULTY["SumsGradients"], optimizer="sgd")
