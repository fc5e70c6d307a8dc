"""Models and heads cut into pipeline stages: loss, outputs, gradients, norm and parameters are those of one process."""

from functools import partial

from cases import Setting, assert_equals_one_process, recompute, zoo_case
from matrix import matrix, named
from model_parity import NAMES, parity_case, parity_setting
from model_zoo import get_model

from booster_hybrid import HybridParallelPlugin
from booster_runtime import enable_activation_checkpointing

SAMPLES = 5
"""Of each data parallel rank: microbatches of three and of two."""
MESHES = {
    "pp2": (2, {"pp_size": 2}),
    "tp2pp2": (4, {"tp_size": 2, "pp_size": 2}),
    "pp2dp2zero1": (4, {"pp_size": 2, "zero_stage": 1}),
    "pp2dp2zero2": (4, {"pp_size": 2, "zero_stage": 2}),
}


@matrix(
    [
        "transformers/falcon_alibi-pp2",
        "transformers/gpt2_double_heads-pp2dp2zero1",
        "heads/llama_classification-pp2",
        "heads/t5_token_classification-pp2",
        "transformers/t5_encoder-tp2pp2",
    ],
    1,
    name=NAMES,
    mesh=MESHES,
)
def test_training_equals_one_process(name, mesh):
    num_ranks, options = MESHES[mesh]
    case = parity_case(name, samples=SAMPLES, outputs=True)
    assert_equals_one_process(case, parity_setting(name, options, num_ranks))


LLAMA = "transformers/llama"


@matrix(["t5_generation-zbv"], name=["t5_generation", "whisper_generation"], style=["gpipe", "interleaved", "zbv"])
def test_every_schedule_trains(name, style):
    setting = parity_setting(f"transformers/{name}", {"pp_size": 2, "pp_style": style}, 2)
    assert_equals_one_process(zoo_case(f"transformers/{name}"), setting, parts=2)


def recomputing(how):
    model = get_model(LLAMA).seeded()
    if how == "by the model":
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    elif how == "before boost":
        enable_activation_checkpointing(model)
    return model


@matrix(
    ["pp2-by the model", "pp2-after boost"],
    options=named([{"pp_size": 2}, {"pp_size": 2, "tp_size": 2}], ["pp2", "tp2pp2"]),
    how=["before boost", "after boost", "by the model"],
)
def test_layers_may_be_recomputed(options, how):
    hook = recompute if how == "after boost" else None
    case = zoo_case(LLAMA, build=partial(recomputing, how), before_step=hook)
    assert_equals_one_process(case, Setting(HybridParallelPlugin, options, 4))
