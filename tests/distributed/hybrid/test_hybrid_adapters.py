"""Low-rank adapters on layers that are split: loss, gradients, norm and parameters are those of one process.

In fp64, since gradients of adapters are small sums of large terms of either sign.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from model_zoo import ZOO
from model_zoo.transformers_heads import HEADS

from booster_core import Booster
from booster_core.testing import run_on_ranks
from booster_core.testing.compare import Tolerance, assert_same_tensors
from booster_core.testing.training import whole_model
from booster_hybrid import HybridParallelPlugin

peft = pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-core[lora]'")

pytestmark = pytest.mark.filterwarnings(
    # Where a test calls peft itself: version 0.21 reads an attribute that transformers 5.23 has renamed.
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

STEPS = 3
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


def adapted(name, config, add=peft.get_peft_model):
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
    return model.double()


def in_double(batch):
    return {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}


def make_optimizer(model):
    # The epsilon is above most gradients, so that rounding errors of tiny ones stay tiny in the parameters.
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-2, weight_decay=0.1)


def plainly(name, config, data_size):
    zoo = MODELS[name]
    model = adapted(name, config)
    optimizer = make_optimizer(model)
    losses, norms, gradients = [], [], []
    for step in range(STEPS):
        loss = zoo.loss_of(model, in_double(zoo.whole(step, data_size, SAMPLES)))
        loss.backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    return losses, norms, gradients, {users_name(n): p for n, p in trained.items()}


def users_name(path):
    return path.removeprefix("base_model.model.").replace(".base_layer", "")


def boosted(name, config, options, precision=None):
    zoo = MODELS[name]
    if "pp_size" in options:
        options = {**options, "example_batch": in_double(zoo.share(0, 0, SAMPLES))}
    booster = Booster("cpu", precision, HybridParallelPlugin(**options))
    model = adapted(name, config, lambda model, lora: booster.enable_lora(model, lora_config=lora))
    optimizer = make_optimizer(model)
    model, optimizer, *_ = booster.boost(model, optimizer)
    data_rank, data_size = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    return booster, model, optimizer, zoo, data_rank, data_size


def backward(booster, model, optimizer, zoo, batch):
    """Run one batch forward and back, and return its loss where this rank has it."""
    if booster.plugin.config.pipeline.size > 1:
        return booster.execute_pipeline(iter([batch]), model, zoo.loss, optimizer)["loss"]
    loss = zoo.loss_of(model, batch)
    booster.backward(loss, optimizer)
    return loss.detach()


def mean_over_ranks(loss):
    found = [None if each is None else float(each) for each in gathered(loss)]
    known = [each for each in found if each is not None]
    return sum(known) / len(known)


def gathered(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def compare(name, config, options):
    booster, model, optimizer, zoo, data_rank, data_size = boosted(name, config, options)
    losses, norms, gradients, parameters = plainly(name, config, data_size)
    for step in range(STEPS):
        loss = backward(booster, model, optimizer, zoo, in_double(zoo.share(step, data_rank, SAMPLES)))
        assert mean_over_ranks(loss) == pytest.approx(losses[step], rel=1e-5)
        found = {key: booster.full_gradient(model, key) for key in gradients[step]}
        assert_same_tensors(found, gradients[step], IN_DOUBLE)
        assert float(optimizer.clip_grad_by_norm(1.0)) == pytest.approx(norms[step], rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    whole = whole_model(booster, model)
    assert_same_tensors({key: whole[key] for key in parameters}, parameters, IN_DOUBLE)


TP2 = {"tp_size": 2}
MESHES = {
    "tp2": (2, TP2),
    "tp3": (3, {"tp_size": 3}),
    "tp4": (4, {"tp_size": 4}),
    "tp2pp2": (4, {**TP2, "pp_size": 2}),
    "tp2dp2zero1": (4, {**TP2, "zero_stage": 1}),
    "tp2dp2zero2": (4, {**TP2, "zero_stage": 2}),
    "split_gather": (2, {**TP2, "sequence_parallelism_mode": "split_gather"}),
    "all_to_all": (2, {"sp_size": 2, "sequence_parallelism_mode": "all_to_all"}),
    "ring_attn": (2, {"sp_size": 2, "sequence_parallelism_mode": "ring_attn"}),
    "ring_attn-tp2": (4, {**TP2, "sp_size": 2, "sequence_parallelism_mode": "ring_attn"}),
}
DEFAULT = {
    ("transformers/llama", "tp2pp2"),
    ("transformers/llama", "tp3"),
    ("transformers/llama", "tp4"),
    ("transformers/llama", "split_gather"),
    ("transformers/llama", "ring_attn"),
    ("transformers/gpt2_lm", "tp2"),
    ("heads/falcon_groups_lm", "tp2dp2zero1"),
    ("transformers/t5_generation", "tp2"),
    ("transformers/bert_masked_lm", "tp3"),
}
"""One of each kind; the others are left to the long run."""
SPLIT_POSITIONS = ("split_gather", "all_to_all", "ring_attn", "ring_attn-tp2")
REFUSED = {
    **dict.fromkeys(("transformers/falcon", "transformers/bloom"), SPLIT_POSITIONS[1:]),
    "transformers/deepseek_v3": ("tp3", "tp4"),
    "heads/falcon_groups_lm": ("tp3", "tp4", *SPLIT_POSITIONS[1:]),
}
"""What can't be had of a model, with adapters or without."""


def cases():
    for name in TARGETS:
        for mesh in [mesh for mesh in MESHES if mesh not in REFUSED.get(name, ())]:
            marks = [] if (name, mesh) in DEFAULT else [pytest.mark.slow]
            yield pytest.param(name, mesh, marks=marks, id=f"{name.rpartition('/')[2]}-{mesh}")


@pytest.mark.parametrize(("name", "mesh"), list(cases()))
def test_adapters_train_as_on_one_process(name, mesh):
    num_ranks, options = MESHES[mesh]
    run_on_ranks(compare, num_ranks, name, {}, options)


KINDS = {
    "rslora": ("transformers/llama", {"use_rslora": True, "lora_alpha": 2}),
    "several": ("transformers/llama", {"second": {"r": 2, "target_modules": ["k_proj", "o_proj", "lm_head"]}}),
    "biases": ("transformers/gpt2_lm", {"bias": "all"}),
    "biases-of-adapted": ("transformers/bloom", {"bias": "lora_only"}),
    "biases-of-adapters": ("transformers/gpt2_lm", {"lora_bias": True}),
    "head": ("transformers/llama", {"target_modules": ["v_proj", "lm_head"]}),
    "embedding": ("transformers/llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "tied-embedding": ("transformers/llama_tied", {"target_modules": ["embed_tokens", "q_proj"]}),
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
KINDS_BY_DEFAULT = {
    ("several", "tp2"),
    ("biases", "tp2"),
    ("biases-of-adapters", "split_gather"),
    ("head", "split-logits"),
    ("head", "tp2"),
    ("embedding", "tp2"),
    ("whole-head", "split-logits"),
    ("whole-embedding", "tp2"),
    ("whole-block", "tp2"),
}


def kinds():
    for kind in KINDS:
        for how in HOW:
            marks = [] if (kind, how) in KINDS_BY_DEFAULT else [pytest.mark.slow]
            yield pytest.param(kind, how, marks=marks, id=f"{kind}-{how}")


@pytest.mark.parametrize(("kind", "how"), list(kinds()))
def test_each_kind_of_adapter_trains_as_on_one_process(kind, how):
    num_ranks, options = HOW[how]
    run_on_ranks(compare, num_ranks, *KINDS[kind], options)
