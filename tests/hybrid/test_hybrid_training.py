"""Tensor times data parallel ranks train, clip, save and load as one process does."""

from __future__ import annotations

from functools import partial

import pytest
from cases import Setting, assert_equals_one_process, train_boosted, train_plainly, zoo_case
from matrix import matrix, named
from model_zoo import get_model

from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import assert_same_tensors
from booster_zero import ZeroConfig


def save(folder, booster, model, _optimizer):
    booster.save_model(model, folder, shard=True)


def assert_parity(name, options, num_ranks, folder):
    """Compare a training with that of one process, and the trained model with what transformers loads of it."""
    case = zoo_case(name)
    assert_equals_one_process(case, Setting(HybridParallelPlugin, options, num_ranks), tell=partial(save, folder))
    model = type(case.build()).from_pretrained(folder)
    loaded = {name: parameter.detach() for name, parameter in model.named_parameters()}
    expected = train_plainly(case, num_ranks // options["tp_size"])
    assert_same_tensors(loaded, expected.parameters, case.tolerance)


@matrix(
    ["tp2-transformers/llama"],
    **{
        "num_ranks, options": named(
            [
                (2, {"tp_size": 2}),
                (4, {"tp_size": 2, "zero_stage": 0}),
                (4, {"tp_size": 2, "zero_stage": 1}),
                (4, {"tp_size": 2, "zero_stage": 2}),
                (4, {"tp_size": 2, "zero": ZeroConfig(stage=2, bucket_bytes=4096, overlap_communication=False)}),
            ],
            ["tp2", "tp2dp2", "tp2dp2zero1", "tp2dp2zero2", "tp2dp2options"],
            joint=True,
        )
    },
    name=["transformers/llama", "transformers/llama_tied", "transformers/gpt2_lm"],
)
def test_gradients_norms_and_parameters_are_those_of_one_process(name, num_ranks, options, tmp_path):
    assert_parity(name, options, num_ranks, tmp_path / "out")


@pytest.mark.parametrize(
    "options",
    [pytest.param({"tp_size": 4}, marks=pytest.mark.slow), {"tp_size": 4, "zero_stage": 1}],
    ids=["tp4", "tp4zero1"],
)
def test_key_and_value_heads_that_ranks_share_count_once_in_the_norm(options, tmp_path):
    """Two key/value heads on four ranks: each is held twice."""
    assert_parity("transformers/llama", options, 4, tmp_path / "out")


def test_bf16_stays_near_fp32():
    case = zoo_case("transformers/llama")
    setting = Setting(HybridParallelPlugin, {"tp_size": 2, "zero_stage": 1}, 4, "bf16")
    for result in run_on_ranks(train_boosted, 4, case, setting):
        # bf16 keeps 8 bits: 2**-8 for each of a few roundings on the way.
        assert result.trained.norms == pytest.approx(train_plainly(case, 2).norms, rel=2e-2)


def boost(options):
    Setting(HybridParallelPlugin, options).make_booster().boost(get_model("transformers/llama").seeded())


def test_sizes_that_do_not_divide_the_world_are_named():
    expect_on_ranks(ConfigError, r"tp_size=2` is 2, which does not divide the world size 3", boost, 3, {"tp_size": 2})
