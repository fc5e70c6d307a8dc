"""Models and heads under tensor parallelism: loss, gradients, norm and parameters are those of one process."""

from __future__ import annotations

from cases import assert_equals_one_process, zoo_case
from matrix import matrix, named
from model_parity import NAMES, assert_near_fp32, parity_case, parity_setting


@matrix(
    [
        "transformers/mixtral-tp2",
        "transformers/gpt2_double_heads-tp2",
        "heads/llama_token_classification-tp2",
        "heads/qwen3_lm-tp2",
        "transformers/vit_classification-tp2",
    ],
    name=NAMES,
    **{
        "num_ranks, options": named(
            [(2, {"tp_size": 2}), (4, {"tp_size": 2, "zero_stage": 1})], ["tp2", "tp2dp2zero1"], joint=True
        )
    },
)
def test_training_equals_one_process(name, num_ranks, options):
    assert_equals_one_process(parity_case(name), parity_setting(name, options, num_ranks))


@matrix(["heads/llama_classification"], name=NAMES)
def test_bf16_is_as_near_to_fp32_as_one_process(name):
    assert_near_fp32(zoo_case(name), parity_setting(name, {"tp_size": 2}, 2, "bf16"))
