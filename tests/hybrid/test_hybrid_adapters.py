"""Low-rank adapters on layers that are split: loss, gradients, norm and parameters are those of one process.

In fp64, since gradients of adapters are small sums of large terms of either sign.
"""

import copy
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import Case, Setting, assert_equals_one_process, recompute
from hybrid_runs import RING, ULYSSES
from matrix import matrix, named
from model_zoo import ZOO
from model_zoo.registry import in_double
from model_zoo.transformers_heads import HEADS
from ranked import on_ranks, raises_on_ranks
from torch import nn

from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_hybrid.modules import ModuleNames
from booster_testing.compare import Tolerance

peft = pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-runtime[lora]'")

pytestmark = pytest.mark.filterwarnings(
    # Where a test calls peft itself: version 0.21 reads an attribute that transformers 5.23 has renamed.
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

SAMPLES = 4
IN_DOUBLE = Tolerance(relative=1e-5, reason="transformers' losses are taken in fp32, and some steps follow")
MODELS = {**ZOO, **HEADS}
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS = {
    "transformers/llama": LLAMA,
    "transformers/gpt2_lm": ["c_attn", "c_proj", "c_fc"],
    "heads/falcon_groups_lm": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "transformers/falcon": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "transformers/t5_generation": ["q", "k", "v", "o", "wi", "wo"],
    "transformers/mixtral": LLAMA[:4],
    "transformers/bert_masked_lm": ["query", "key", "value", "dense"],
    "transformers/deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    "transformers/opt": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
    "transformers/whisper_generation": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
    "transformers/bloom": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "transformers/vit_classification": "all-linear",
    "transformers/phi": "all-linear",
    "transformers/glm": "all-linear",
}


def adapted(name, config, add=peft.get_peft_model, dtype=torch.float64):
    """Return a model with adapters that have an effect, the same in every process."""
    model = MODELS[name].seeded().double()
    if "mixtral" in name or "deepseek" in name:
        model.set_experts_implementation("eager")  # the grouped products know no fp64
    known = {"target_modules": TARGETS.get(name), "r": 3, "init_lora_weights": False, "fan_in_fan_out": "gpt2" in name}
    known.update(config)
    second = known.pop("second", None)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`", category=UserWarning)
        torch.manual_seed(5)
        model = add(model, peft.LoraConfig(**known))
        if second is not None:
            model.add_adapter("second", peft.LoraConfig(**{**known, **second}))
            model.base_model.set_adapter(["default", "second"])
    return model.to(dtype)


def make_optimizer(model):
    # The epsilon is above most gradients, so that rounding errors of tiny ones stay tiny in the parameters.
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-2, weight_decay=0.1)


def case_of(name, config, **changes):
    functions = {"build": partial(adapted, name, config), "batch": partial(batch_of, name), "loss": MODELS[name].loss}
    return Case(optimizer=make_optimizer, max_norm=1.0, tolerance=IN_DOUBLE, **functions, **changes)


def batch_of(name, number, replica):
    return in_double(MODELS[name].share(number, replica, SAMPLES))


def setting_of(name, num_ranks, options, precision=None):
    """Return a setting with an example, since some layers take more than hidden states."""
    return Setting(HybridParallelPlugin, {**options, "example_batch": batch_of(name, 0, 0)}, num_ranks, precision)


def assert_parity(name, config, mesh, **changes):
    assert_equals_one_process(case_of(name, config, **changes), setting_of(name, *mesh))


def boosted(name, config, options):
    booster = setting_of(name, 2, options).make_booster()
    model = adapted(name, config, lambda model, lora: booster.enable_lora(model, lora_config=lora))
    return booster.boost(model, make_optimizer(model)).model


TP2 = {"tp_size": 2}
MESHES = {
    "tp2": (2, TP2),
    "tp3": (3, {"tp_size": 3}),
    "tp4": (4, {"tp_size": 4}),
    "tp2pp2": (4, {**TP2, "pp_size": 2}),
    "tp2dp2zero1": (4, {**TP2, "zero_stage": 1}),
    "tp2dp2zero2": (4, {**TP2, "zero_stage": 2}),
    "tp2dp2zero3": (4, {**TP2, "zero_stage": 3}),
    "split_gather": (2, {**TP2, "sequence_parallelism_mode": "split_gather"}),
    "all_to_all": (2, ULYSSES),
    "ring_attn": (2, RING),
    "ring_attn-tp2": (4, {**TP2, **RING}),
}
SPLIT_POSITIONS = ("split_gather", "all_to_all", "ring_attn", "ring_attn-tp2")
REFUSED = {
    **dict.fromkeys(("transformers/falcon", "transformers/bloom"), SPLIT_POSITIONS[1:]),
    "transformers/deepseek_v3": ("tp3", "tp4"),
    "heads/falcon_groups_lm": ("tp3", "tp4", *SPLIT_POSITIONS[1:]),
}
"""What can't be had of a model, with adapters or without."""


OF_EACH = ("tp2", *SPLIT_POSITIONS[:3])
"""Meshes on which layers are split in other ways: the others differ by their ranks alone."""
NOT_REFUSED = [
    (name, mesh)
    for name in TARGETS
    for mesh in (MESHES if name == "transformers/llama" else OF_EACH)
    if mesh not in REFUSED.get(name, ())
]


@matrix(
    ["llama-split_gather", "gpt2_lm-tp2", "whisper_generation-all_to_all"],
    **{
        "name, mesh": named(
            NOT_REFUSED, [f"{name.rpartition('/')[2]}-{mesh}" for name, mesh in NOT_REFUSED], joint=True
        )
    },
)
def test_adapters_train_as_on_one_process(name, mesh):
    assert_parity(name, {}, MESHES[mesh])


@matrix(["2"], zero_stage=[0, 2, 3])
def test_adapters_train_in_stages_of_replicas(zero_stage):
    assert_parity("transformers/llama", {}, (4, {"pp_size": 2, "zero_stage": zero_stage}))


@pytest.mark.parametrize("mesh", ["tp4", *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in SPLIT_POSITIONS)])
def test_layers_with_adapters_may_be_recomputed(mesh):
    assert_parity("transformers/llama", {}, MESHES[mesh], before_step=recompute)


def loss_in_double(outputs, batch):
    """Return the next-token loss in the format of the logits; transformers' own is taken in fp32."""
    return nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


# Its adapters' gradients are small, and what the loss rounds is more of them than the tolerance.
IN_DOUBLE_THROUGHOUT = "llama with its loss in fp64"
MODELS[IN_DOUBLE_THROUGHOUT] = replace(ZOO["transformers/llama"], loss=loss_in_double)

KINDS = {
    "rslora": (IN_DOUBLE_THROUGHOUT, {"use_rslora": True, "lora_alpha": 2}),
    "several": ("transformers/llama", {"second": {"r": 2, "target_modules": ["k_proj", "o_proj", "lm_head"]}}),
    "biases": ("transformers/gpt2_lm", {"bias": "all"}),
    "biases-of-adapted": ("transformers/bloom", {"bias": "lora_only"}),
    "biases-of-adapters": ("transformers/gpt2_lm", {"lora_bias": True}),
    "head": ("transformers/llama", {"target_modules": ["v_proj", "lm_head"]}),
    "embedding": ("transformers/llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "tied-embedding": ("transformers/llama_tied", {"target_modules": ["embed_tokens", "q_proj"]}),
    "whole-tied": (
        "transformers/llama_tied",
        {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "whole-head": ("transformers/llama", {"target_modules": ["k_proj"], "modules_to_save": ["lm_head"]}),
    "whole-embedding": ("transformers/llama", {"target_modules": ["k_proj"], "modules_to_save": ["embed_tokens"]}),
    "whole-block": ("transformers/llama", {"target_modules": ["down_proj"], "modules_to_save": ["self_attn"]}),
    "whole-classifier": ("heads/llama_classification", {"target_modules": ["q_proj"], "modules_to_save": ["score"]}),
}
HOW = {
    "tp2": MESHES["tp2"],
    "tp4": MESHES["tp4"],
    "split-logits": (2, {**TP2, "parallel_output": True}),
    "tp2pp2": MESHES["tp2pp2"],
    "split_gather": MESHES["split_gather"],
}


@matrix(["head-tp2", "whole-embedding-tp2pp2"], 1, kind=KINDS, how=HOW)
def test_each_kind_of_adapter_trains_as_on_one_process(kind, how):
    assert_parity(*KINDS[kind], HOW[how])


@on_ranks(2)
def test_dropout_matches_on_replicated_and_differs_on_sharded_activations():
    name = "transformers/llama"
    model = boosted(name, {"lora_dropout": 0.5}, TP2)
    dropped = {}
    for path, module in model.unwrap().named_modules():
        if isinstance(module, nn.Dropout) and "lora_dropout" in path:
            found = dropped.setdefault(path.split(".")[-3], [])
            module.register_forward_hook(lambda _, __, output, found=found: found.append(output == 0))
    model(**batch_of(name, 0, 0))
    of_ranks = [None, None]
    dist.all_gather_object(of_ranks, dropped)
    masks, others = of_ranks
    assert masks.keys() == set(LLAMA)
    for name, found in masks.items():
        is_alike = [torch.equal(*each) for each in zip(found, others[name], strict=True)]
        assert is_alike == [name not in ("o_proj", "down_proj")] * 2, name
    assert not torch.equal(masks["q_proj"][0], masks["k_proj"][0])


@raises_on_ranks(ConfigError, r"q_proj' has adapters with `use_dora=True`.*choose plain LoRA, or use `tp_size=1`", 2)
def test_adapters_that_need_whole_weights_are_refused_on_every_rank():
    boosted("transformers/llama", {"use_dora": True, "target_modules": ["q_proj"]}, TP2)


@on_ranks(2)
def test_trained_tokens_of_an_embedding_that_a_plan_splits_are_refused():
    """Plans of transformers 5.12 leave the table of a Llama whole, with which it trains."""
    name, config = "transformers/llama", {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]}
    if any(pattern.endswith("embed_tokens") for pattern in MODELS[name].seeded()._tp_plan):
        match = r"embed_tokens' has adapters of peft's type .*\.TrainableTokens.*`trainable_token_indices`"
        with pytest.raises(ConfigError, match=match):
            boosted(name, config, TP2)
    else:
        assert_parity(name, config, (2, TP2))


@raises_on_ranks(ConfigError, r"`adapter_names` takes each sample.*Call `set_adapter`", 2)
def test_batches_of_several_adapters_are_refused():
    model = boosted("transformers/llama", {}, TP2).eval()
    tokens = torch.zeros((2, 4), dtype=torch.int64)
    model(input_ids=tokens, adapter_names=["default", "__base__"])


def test_user_modules_named_like_adapters_are_kept():
    model = nn.ModuleDict({"lora_A": nn.Linear(2, 2), "modules_to_save": nn.ModuleDict({"up": nn.Linear(2, 2)})})
    names = ModuleNames(model)
    assert set(names.modules) == {"", "lora_A", "modules_to_save", "modules_to_save.up"}
    assert names.in_rules("modules_to_save.up") == "modules_to_save.up"


@matrix(
    ["ring_attn-boosted"], mesh=["tp2", "split_gather", "ring_attn"], inside=named([False, True], ["boosted", "inside"])
)
@raises_on_ranks(ConfigError, r"can't be copied: .*Copy it before `boost`", 2)
def test_a_copy_is_refused(mesh, inside):
    model = boosted("transformers/llama", {}, MESHES[mesh][1])
    copy.deepcopy(model.unwrap() if inside else model)
