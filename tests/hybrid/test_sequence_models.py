"""Models and heads with split sequences: loss, gradients, norm and parameters are those of one process."""

from __future__ import annotations

from cases import Setting, assert_equals_one_process, train_boosted, zoo_case
from matrix import matrix
from model_parity import NAMES, assert_near_fp32, parity_case, parity_setting
from t5_sequences import REFUSED, is_refused

from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_testing import expect_on_ranks

ULYSSES = {"sp_size": 2, "sequence_parallelism_mode": "all_to_all"}
RING = {"sp_size": 2, "sequence_parallelism_mode": "ring_attn"}
SPLIT = {"tp_size": 2, "sequence_parallelism_mode": "split_gather"}
MODES = {"all_to_all": ULYSSES, "ring_attn": RING, "split_gather": SPLIT}
MESHES = {
    **{mode: (2, options) for mode, options in MODES.items()},
    **{f"{mode}-dp2zero1": (4, {**options, "zero_stage": 1}) for mode, options in MODES.items()},
    "all_to_all-tp2": (4, {**ULYSSES, "tp_size": 2}),
    "ring_attn-tp2": (4, {**RING, "tp_size": 2}),
}
WITHOUT_SEQUENCES = ("transformers/sam",)
SPLITTABLE = [name for name in NAMES if name not in WITHOUT_SEQUENCES]


def assert_parity(name, mesh, **more):
    num_ranks, options = MESHES[mesh]
    if "pp_size" in more:
        num_ranks *= more["pp_size"]
    case, setting = parity_case(name), parity_setting(name, {**options, **more}, num_ranks)
    if is_refused(name, options):
        expect_on_ranks(ConfigError, REFUSED, train_boosted, num_ranks, case, setting, timeout_seconds=120)
    else:
        assert_equals_one_process(case, setting)


@matrix(
    [
        "all_to_all-transformers/bloom",
        "ring_attn-transformers/falcon_alibi",
        "ring_attn-transformers/gptj",
        "ring_attn-transformers/deepseek_v3",
        "ring_attn-transformers/gpt2_double_heads",
        "ring_attn-transformers/vit_classification",
        "ring_attn-heads/qwen3_question_answering",
        "split_gather-transformers/blip2",
        "split_gather-transformers/falcon_alibi",
    ],
    mesh=MESHES,
    name=SPLITTABLE,
)
def test_training_with_split_sequences_equals_one_process(mesh, name):
    assert_parity(name, mesh)


@matrix(
    ["transformers/t5_generation-all_to_all"],
    name=["transformers/t5_generation", "transformers/whisper_generation", "transformers/llama"],
    mode=MODES,
)
def test_stages_of_a_pipeline_split_sequences_too(mode, name):
    assert_parity(name, mode, pp_size=2)


@matrix(["all_to_all-transformers/gpt2_lm"], mode=MODES, name=SPLITTABLE)
def test_bf16_with_split_sequences_is_as_near_to_fp32_as_one_process(mode, name):
    if not is_refused(name, MODES[mode]):
        assert_near_fp32(zoo_case(name), parity_setting(name, MODES[mode], 2, "bf16"))


@matrix(["ring_attn"], mode=MODES)
def test_positions_in_a_plane_are_refused(mode):
    without_batch = "It could not be checked whether 'vision_encoder"  # its tensor parallel layers come first
    message = without_batch if mode == "split_gather" else f"mode='{mode}'.*policy of SamModel names none"
    setting = Setting(HybridParallelPlugin, MODES[mode])
    expect_on_ranks(ConfigError, message, train_boosted, 2, zoo_case("transformers/sam"), setting)
