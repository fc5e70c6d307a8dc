"""Tiny mixtures of experts of transformers, and their training in one process, for tests of expert parallelism."""

from functools import partial

import torch
from cases import Case
from model_zoo import transformers_language as language
from model_zoo.transformers_build import from_config

from booster_hybrid.policy.find import expert_rules
from booster_testing.compare import Tolerance

LENGTH, SAMPLES = 8, 2
MAX_NORM = 0.5
_TOLERANCE = Tolerance(relative=1e-6, reason="transformers takes softmaxes, norms and losses in fp32 in any format")
_SIZES = {**language._SIZES, "intermediate_size": 32}
_SPARSE = {
    **_SIZES,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "decoder_sparse_step": 1,
}
_ROUTED = {
    **_SIZES,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT = {**language._LATENT, "intermediate_size": 32, "n_routed_experts": 8}
_BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
MODELS = {
    "mixtral": ("Mixtral", {**_SIZES, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "mixtral_balanced": ("Mixtral", {**_SIZES, "num_local_experts": 8, "num_experts_per_tok": 2, **_BALANCED}),
    "qwen2_moe": ("Qwen2Moe", {**_SPARSE, **_BALANCED}),
    "qwen3_moe": ("Qwen3Moe", {**_SPARSE, "head_dim": 8}),
    "deepseek_v2": ("DeepseekV2", {**_LATENT, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3", _LATENT),
    "glm4_moe": ("Glm4Moe", {**_ROUTED, "head_dim": 8}),
    "llama4": (
        "Llama4",
        {**_SIZES, "num_local_experts": 8, "num_experts_per_tok": 1, "intermediate_size_mlp": 32, "head_dim": 8},
    ),
    "gpt_oss": ("GptOss", {**_SIZES, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8}),
}


def make(name, *, one_sided=False, dtype=torch.float64, **settings):
    """Return a model in training mode, equal in every process.

    Args:
        name: One of `MODELS`.
        one_sided: Let every token choose the first two experts, for models that have a bias for that.
        dtype: Of its parameters; the grouped kernel has no fp64, so that experts run one after the other in it.
        **settings: Further settings of its configuration.
    """
    family, known = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        config = f"{family}TextConfig" if family == "Llama4" else f"{family}Config"
        model = from_config(config, f"{family}ForCausalLM", **{**known, **settings})().train().to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # biases begin with zeros, which don't show how often they are added
                    parameter.add_(torch.randn_like(parameter), alpha=0.05)
            for key, tensor in [*model.named_buffers(), *model.named_parameters()]:
                if key.endswith("e_score_correction_bias"):
                    tensor.copy_(torch.randn_like(tensor) * 0.1)
                if one_sided and key.endswith(("e_score_correction_bias", "router.bias")):
                    tensor[:2] += 100.0
    if dtype == torch.float64:
        model.config._experts_implementation = "eager"
    if not expert_rules(model):
        # Few families of transformers before 5.13 have a plan for their experts.
        experts = "model.layers.*.mlp.experts"
        model._ep_plan = {f"{experts}.gate_up_proj": "grouped_gemm", f"{experts}.down_proj": "grouped_gemm"}
    return model


def batch_of(step, data_rank, samples=SAMPLES):
    """Return a data parallel rank's batch of a step, all different."""
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    tokens = torch.randint(3, 64, (samples, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def make_optimizer(model):
    """Return an optimizer whose epsilon keeps rounding errors of small gradients small."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.1)


def expert_case(name, *, steps=2, settings=None, **changes):
    """Return a training of one of `MODELS`, in fp64 unless its settings say otherwise.

    The gradients of a second step show whether the first one changed every parameter as it should.
    """
    functions = {"build": partial(make, name, **(settings or {})), "batch": batch_of, "optimizer": make_optimizer}
    return Case(**{**functions, "steps": steps, "max_norm": MAX_NORM, "tolerance": _TOLERANCE, **changes})
