"""The part of the conformance kit that further variants of a plugin run by default; see the marker ``by_default``."""

import pytest

ARITHMETIC = (
    "test_boost_makes_ranks_equal_or_raises",
    "test_equals_one_process",
    "test_lazy_model_trains_like_an_eager_model",
    "test_ranks_hold_equal_parameters",
    "test_accumulation_equals_one_large_batch[unequal]",
    "test_loop_equals_one_process[two losses under no_sync]",
    "test_loop_equals_one_process[evaluation between]",
    "test_clips_by_the_global_norm[0.05-1.0]",
    "test_clips_by_the_global_norm[0.05-2.0]",
    "test_low_precision_equals_one_process",
    "test_overflow_on_one_rank_skips_the_step_on_all_ranks",
    "test_resumed_run_continues_exactly[bf16]",
    "test_checkpoint_loads_on_one_device[bf16]",
    "test_checkpoint_of_one_device_loads[bf16]",
    "test_loads_at_another_world_size",
)
"""Tests of what options of memory and communication can change: values, and where they are."""

arithmetic_by_default = pytest.mark.by_default(*ARITHMETIC)
"""Mark a class of the kit whose plugin has another class that runs the whole kit by default."""
