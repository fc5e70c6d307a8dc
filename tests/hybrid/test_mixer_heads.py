"""Parts of layers that mix positions, by heads: between ranks of a sequence, and split by tensor parallelism.

The terms of all ranks sum to what the whole part computes; models that are split train and are saved as whole ones.
"""

from __future__ import annotations

import copy
import sys
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from cases import Case, Setting, assert_equals_one_process, own_loss
from compiler_warnings import ignore_compiler_warnings
from hybrid_runs import SPLIT_GATHER
from matrix import matrix, named
from model_parity import assert_parts_of_gradients
from ranked import on_ranks, raises_on_ranks
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_hybrid.mesh import AloneRank, RankGroup
from booster_hybrid.policy.find import policy_for
from booster_hybrid.policy.mixers import MIXERS
from booster_hybrid.sequence_parallel.mixers import ForwardOfHeads
from booster_hybrid.tensor_parallel.plan import parallelize
from booster_testing.compare import Tolerance

DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "intermediate_size": 64,
    "pad_token_id": 0,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    "num_experts_per_tok": 2,
}
MAMBA = {"mamba_n_groups": 2, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_expand": 2}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3NextGatedDeltaNet": ("Qwen3NextConfig", DELTA),
    "Qwen3_5GatedDeltaNet": ("Qwen3_5TextConfig", DELTA),
    "Qwen3_5MoeGatedDeltaNet": ("Qwen3_5MoeTextConfig", DELTA),
    "Qwen4ExpTextGatedDeltaNet": ("Qwen4ExpTextConfig", DELTA),
    "OlmoHybridGatedDeltaNet": ("OlmoHybridConfig", DELTA),
    "KimiLinearDeltaAttention": (
        "KimiLinearConfig",
        {
            "linear_num_heads": 4,
            "linear_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
            "num_key_value_heads": 4,
        },
    ),
    "NemotronHMamba2Mixer": (
        "NemotronHConfig",
        {
            "n_groups": 2,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "layer_types": ["linear_attention", "mlp"],
        },
    ),
    "Zamba2MambaMixer": (
        "Zamba2Config",
        {
            "layer_types": ["mamba", "hybrid"],
            "mamba_ngroups": 2,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "mamba_d_state": 8,
            "mamba_expand": 2,
        },
    ),
    "BambaMixer": ("BambaConfig", {**MAMBA, "attn_layer_indices": [1]}),
    "GraniteMoeHybridMambaLayer": ("GraniteMoeHybridConfig", {**MAMBA, "layer_types": ["mamba", "attention"]}),
    "Mamba2Mixer": ("Mamba2Config", {"n_groups": 2, "num_heads": 8, "head_dim": 8, "state_size": 8, "expand": 2}),
    "FalconH1Mixer": (
        "FalconH1Config",
        {**MAMBA, "mamba_d_ssm": 64, "mamba_rms_norm": True, "ssm_multipliers": [1.1, 0.9, 1.2, 0.8, 1.3]},
    ),
    "Lfm2ShortConv": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "Lfm2MoeShortConv": ("Lfm2MoeConfig", {"layer_types": ["conv", "full_attention"]}),
    "Lfm3ShortConv": ("Lfm3Config", {"layer_types": ["conv", "full_attention"]}),
}
RANKS = 2


def mixer_of(kind: str) -> nn.Module:
    """Return a part of a class with random weights, biases and norms too, in fp64."""
    name, options = CONFIGS[kind]
    config = getattr(transformers, name)(**SMALL | options)
    module = __import__(config.__module__.replace("configuration", "modeling"), fromlist=[kind])
    torch.manual_seed(0)
    mixer: nn.Module = getattr(module, kind)(config, layer_idx=0).double()
    if kind == "FalconH1Mixer":  # which the model makes
        mixer.register_buffer("mup_vector", module.compute_mup_vector(config).double(), persistent=False)
    for parameter in mixer.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    return mixer


@pytest.mark.parametrize("kind", MIXERS)
def test_the_terms_of_ranks_sum_to_the_whole(kind):
    hidden = torch.randn(2, 80, SMALL["hidden_size"], dtype=torch.float64)
    mixer = mixer_of(kind)
    whole_input = hidden.clone().requires_grad_()
    with FlopCounterMode(display=False) as counter:
        output = mixer(whole_input)
    operations, weights = counter.get_total_flops(), output.detach().sin()
    wanted = [*mixer.parameters(), whole_input]
    expected = torch.autograd.grad((output * weights).sum(), wanted)
    sums = [torch.zeros_like(each) for each in wanted]
    total = torch.zeros_like(output)
    for rank in range(RANKS):
        part = mixer_of(kind)
        forward = ForwardOfHeads.of(part, AloneRank(None, rank, RANKS))
        assert forward is not None
        given = hidden.clone().requires_grad_()
        with FlopCounterMode(display=False) as counter:
            term = part(given)
        assert forward.is_partial
        assert counter.get_total_flops() <= 0.62 * operations, "a rank computes its heads alone"
        gradients = torch.autograd.grad((term * weights).sum(), [*part.parameters(), given], allow_unused=True)
        total += term.detach()
        for place, gradient in enumerate(gradients):
            sums[place] += 0 if gradient is None else gradient
    for found, value in zip([total, *sums], [output.detach(), *expected], strict=True):
        # Several of the models compute recurrences in fp32, whatever the format.
        torch.testing.assert_close(found, value, rtol=0, atol=1e-6 * value.abs().max().item())


def test_heads_that_ranks_cannot_share_out_stay_together():
    assert ForwardOfHeads.of(mixer_of("Qwen3NextGatedDeltaNet"), AloneRank(None, 0, 3)) is None


def test_what_hangs_on_a_part_sees_it_whole():
    mixer = mixer_of("Lfm2ShortConv")
    hidden = torch.randn(1, 12, SMALL["hidden_size"], dtype=torch.float64)
    expected = mixer(hidden)
    forward = ForwardOfHeads.of(mixer, AloneRank(None, 1, RANKS))
    seen = []
    mixer.in_proj.register_forward_hook(lambda _module, _args, output: seen.append(output.shape[-1]))
    torch.testing.assert_close(mixer(hidden), expected)
    assert (seen, forward.is_partial) == ([3 * SMALL["hidden_size"]], False)


TRAINED = [kind for kind in CONFIGS if kind not in ("Qwen4ExpTextGatedDeltaNet", "Zamba2MambaMixer")]
"""Those of models whose other layers can be split, or stay whole."""
LIKE_FP32 = Tolerance(relative=1e-5, reason="several models compute recurrences in fp32, whatever the format")
MESHES = {
    "tp2": (2, {"tp_size": 2}),
    "tp2zero3": (4, {"tp_size": 2, "zero_stage": 3}),
    "tp2pp2": (4, {"tp_size": 2, "pp_size": 2, "num_microbatches": 2}),
    "split_gather": (2, SPLIT_GATHER),
}


def whole_model_of(kind: str, **options: Any) -> nn.Module:
    """Return a model with such parts, with random weights, biases and norms too, in fp64."""
    name, of_kind = CONFIGS[kind]
    config = getattr(transformers, name)(
        **SMALL | {"use_cache": False, "tie_word_embeddings": False} | of_kind | options
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped products know no fp64
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.2, 0.2)
    return model


def batch_of(number: int, replica: int, samples: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7 * number + replica)
    tokens = torch.randint(1, SMALL["vocab_size"], (samples, 14), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def assert_split_for_good(kind: str, **options: Any) -> None:
    whole = whole_model_of(kind, **options)
    model = copy.deepcopy(whole)
    split = parallelize(model, policy_for(whole), RankGroup.of(None), parallel_output=False)
    mixers = {name: each for name, each in model.named_modules() if type(each).__name__ == kind}
    assert mixers
    for name, mixer in mixers.items():
        heads = MIXERS[kind]
        parts = {key for key, _ in mixer.named_parameters() if f"{name}.{key}" in split.splits}
        assert parts == {key for key in heads.cuts if key in dict(mixer.named_parameters())}
    expected, found = (own_loss(each(**batch_of(0, 0)), None) for each in (whole, model))
    expected.backward()
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
    assert_parts_of_gradients(model, split.splits, whole, kind, relative=1e-5)
    assert all(each.training for each in model.modules())


@matrix(["Qwen3NextGatedDeltaNet"], kind=TRAINED)
@on_ranks(2)
def test_heads_are_split_by_tensor_parallelism(kind):
    assert_split_for_good(kind)


@on_ranks(2)
def test_ranks_may_have_different_numbers_of_heads():
    assert_split_for_good("Qwen3NextGatedDeltaNet", linear_num_key_heads=3, linear_num_value_heads=6)


@on_ranks(2)
def test_fewer_heads_than_ranks_are_left_to_other_rules():
    whole = whole_model_of("BambaMixer", mamba_n_groups=1)
    model = copy.deepcopy(whole)
    split = parallelize(model, policy_for(whole), RankGroup.of(None), parallel_output=False)
    assert not [name for name in split.splits if "mamba" in name]
    expected, found = (own_loss(each(**batch_of(0, 0)), None) for each in (whole, model))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)


@raises_on_ranks(ConfigError, r"'backbone\.layers\.0\.mixer.*has 1 .*heads.*`zero_stage=3`", 2)
def test_a_model_none_of_whose_layers_can_be_split_is_refused() -> None:
    model = whole_model_of("Mamba2Mixer", n_groups=1)
    Booster(plugin=HybridParallelPlugin(tp_size=2)).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


@matrix(
    ["Lfm2ShortConv-split_gather", "FalconH1Mixer-tp2zero3"],
    kind=["Qwen3NextGatedDeltaNet", "KimiLinearDeltaAttention", "FalconH1Mixer", "Lfm2ShortConv"],
    mesh=named(MESHES.values(), MESHES),
)
def test_models_train_as_in_one_process_and_go_on_from_a_checkpoint(kind, mesh, tmp_path):
    num_ranks, options = mesh
    setting = Setting(HybridParallelPlugin, {**options, "example_batch": batch_of(0, 0)}, num_ranks)
    case = Case(build=partial(whole_model_of, kind), batch=batch_of, tolerance=LIKE_FP32, max_norm=1.0)
    assert_equals_one_process(case, setting, checkpoint=tmp_path / "checkpoint")


# Version 0.21 of peft reads an attribute that transformers 5.23 has renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@matrix(
    ["qwen"],
    case=named(
        [
            ("Qwen3NextGatedDeltaNet", ["in_proj_qkvz", "out_proj"]),
            ("BambaMixer", ["in_proj", "out_proj"]),
            ("KimiLinearDeltaAttention", ["g_a_proj", "g_b_proj", "q_proj"]),
        ],
        ["qwen", "bamba", "kimi"],
    ),
)
@on_ranks(2)
def test_split_heads_generate_and_have_adapters(case):
    peft = pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-runtime[lora]'")
    kind, targets = case
    whole = whole_model_of(kind).eval()
    prompt = batch_of(0, 0)["input_ids"]
    expected = whole.generate(prompt, max_new_tokens=5, do_sample=False, use_cache=True)
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    torch.manual_seed(3)
    plain = peft.get_peft_model(copy.deepcopy(whole), config)
    model = copy.deepcopy(plain)
    parallelize(whole, policy_for(whole), RankGroup.of(None), parallel_output=False)
    assert torch.equal(whole.generate(prompt, max_new_tokens=5, do_sample=False, use_cache=True), expected)
    split = parallelize(model, policy_for(model), RankGroup.of(None), parallel_output=False)
    for each in (plain, model):
        own_loss(each(**batch_of(0, 0)), None).backward()
    found = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            of_rank = split.splits.get(name.replace("base_model.model.", "", 1))
            wanted = parameter.grad if of_rank is None else of_rank.take(parameter.grad)
            torch.testing.assert_close(found[name].grad, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


@matrix(["FalconH1Mixer"], kind=["FalconH1Mixer", "BambaMixer"])
@on_ranks(2)
def test_kernels_for_a_whole_part_are_not_used_for_some_heads(kind: str) -> None:
    """A kernel that takes the last weight itself must not be asked: nobody would sum what it returns."""
    whole = whole_model_of(kind)
    model = copy.deepcopy(whole)
    parallelize(model, policy_for(whole), RankGroup.of(None), parallel_output=False)
    code = sys.modules[type(whole).__module__]
    asked = []
    code.mamba2_split_conv1d_scan_combined = lambda *_, **__: asked.append(1)
    own_loss(model(**batch_of(0, 0)), None)
    assert not asked
    expected = own_loss(whole(**batch_of(0, 0)), None)
    assert asked
    ignore_compiler_warnings()
    for module in model.modules():
        if type(module).__name__ == kind:
            module.compile(backend="eager")
    found = own_loss(model(**batch_of(0, 0)), None)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
    assert all(each.training for each in model.modules())
