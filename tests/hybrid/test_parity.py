"""Models and heads on every mesh: loss, gradients, norm and parameters are those of one process."""

from cases import Setting, assert_equals_one_process, train_boosted, zoo_case
from hybrid_runs import MODES
from matrix import matrix
from model_parity import NAMES, assert_near_fp32, parity_case, parity_setting
from t5_sequences import REFUSED, is_refused

from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_testing import expect_on_ranks

TENSOR = {"tp_size": 2}
PLAIN = {"tp2": (2, TENSOR), "tp2-dp2zero1": (4, {**TENSOR, "zero_stage": 1})}
SEQUENCES = {mode: (2, options) for mode, options in MODES.items()}
OF_REPLICAS = {
    **{f"{mode}-dp2zero1": (4, {**options, "zero_stage": 1}) for mode, options in MODES.items()},
    "all_to_all-tp2": (4, {**MODES["all_to_all"], **TENSOR}),
    "ring_attn-tp2": (4, {**MODES["ring_attn"], **TENSOR}),
}
WITHOUT_SEQUENCES = ("transformers/sam",)
SPLITTABLE = [name for name in NAMES if name not in WITHOUT_SEQUENCES]


def assert_parity(name, mesh, **more):
    num_ranks, options = {**PLAIN, **SEQUENCES, **OF_REPLICAS}[mesh]
    if "pp_size" in more:
        num_ranks *= more["pp_size"]
    case, setting = parity_case(name), parity_setting(name, {**options, **more}, num_ranks)
    if is_refused(name, options):
        expect_on_ranks(ConfigError, REFUSED, train_boosted, num_ranks, case, setting, timeout_seconds=120)
    else:
        assert_equals_one_process(case, setting)


@matrix(
    [
        "transformers/mixtral-tp2",
        "transformers/gpt2_double_heads-tp2",
        "heads/llama_token_classification-tp2",
        "heads/qwen3_lm-tp2",
        "transformers/vit_classification-tp2",
    ],
    1,
    name=NAMES,
    mesh=PLAIN,
)
def test_training_with_split_layers_equals_one_process(name, mesh):
    assert_parity(name, mesh)


@matrix(["llama-4"], name=["llama", "qwen2", "glm", "falcon", "falcon_alibi"], tp_size=[3, 4])
def test_key_and_value_heads_that_ranks_share_count_once_in_the_norm(name, tp_size):
    """Two key/value heads, or one, serve four queries: with sizes that do not divide either."""
    name = f"transformers/{name}"
    assert_equals_one_process(parity_case(name), parity_setting(name, {"tp_size": tp_size, "zero_stage": 1}, tp_size))


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
    mesh=SEQUENCES,
    name=SPLITTABLE,
)
def test_training_with_split_sequences_equals_one_process(mesh, name):
    assert_parity(name, mesh)


@matrix([], 1, mesh=OF_REPLICAS, name=SPLITTABLE)
def test_replicas_and_tensor_parallel_ranks_split_sequences_too(mesh, name):
    assert_parity(name, mesh)


@matrix(
    ["transformers/t5_generation-all_to_all"],
    name=["transformers/t5_generation", "transformers/whisper_generation", "transformers/llama"],
    mode=MODES,
)
def test_stages_of_a_pipeline_split_sequences_too(mode, name):
    assert_parity(name, mode, pp_size=2)


@matrix(
    ["tp2-heads/llama_classification", "all_to_all-transformers/gpt2_lm", "pp2-heads/llama_lm"],
    1,
    mesh=["tp2", "pp2", *MODES],
    name=NAMES,
)
def test_bf16_is_as_near_to_fp32_as_one_process(mesh, name):
    options = {"tp2": TENSOR, "pp2": {"pp_size": 2}, **MODES}[mesh]
    if mesh in ("tp2", "pp2") or not (name in WITHOUT_SEQUENCES or is_refused(name, options)):
        assert_near_fp32(zoo_case(name), parity_setting(name, options, 2, "bf16"))


@matrix(["ring_attn"], mode=MODES)
def test_positions_in_a_plane_are_refused(mode):
    without_batch = "It could not be checked whether 'vision_encoder"  # its tensor parallel layers come first
    message = without_batch if mode == "split_gather" else f"mode='{mode}'.*policy of SamModel names none"
    setting = Setting(HybridParallelPlugin, MODES[mode])
    expect_on_ranks(ConfigError, message, train_boosted, 2, zoo_case("transformers/sam"), setting)
