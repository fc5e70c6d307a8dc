"""Parts of layers that mix positions, by heads: the terms of all ranks sum to what the whole part computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from booster_hybrid.sequence_parallel.mixer_heads import MIXERS, ForwardOfHeads

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
        {"linear_num_heads": 4, "linear_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
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
    "BambaMixer": ("BambaConfig", MAMBA),
    "GraniteMoeHybridMambaLayer": ("GraniteMoeHybridConfig", {**MAMBA, "layer_types": ["mamba", "attention"]}),
    "Lfm2ShortConv": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "Lfm2MoeShortConv": ("Lfm2MoeConfig", {"layer_types": ["conv", "full_attention"]}),
    "Lfm3ShortConv": ("Lfm3Config", {"layer_types": ["conv", "full_attention"]}),
}
RANKS = 2


@dataclass
class Rank:
    """One of several ranks, which sends nothing."""

    rank: int
    size: int = RANKS


def mixer_of(kind: str) -> nn.Module:
    """Return a part of a class with random weights, biases and norms too, in fp64."""
    name, options = CONFIGS[kind]
    config = getattr(transformers, name)(**SMALL | options)
    module = __import__(config.__module__.replace("configuration", "modeling"), fromlist=[kind])
    torch.manual_seed(0)
    mixer: nn.Module = getattr(module, kind)(config, layer_idx=0).double()
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
        forward = ForwardOfHeads.of(part, Rank(rank))
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
    assert ForwardOfHeads.of(mixer_of("Qwen3NextGatedDeltaNet"), Rank(0, 3)) is None


def test_what_hangs_on_a_part_sees_it_whole():
    mixer = mixer_of("Lfm2ShortConv")
    hidden = torch.randn(1, 12, SMALL["hidden_size"], dtype=torch.float64)
    expected = mixer(hidden)
    forward = ForwardOfHeads.of(mixer, Rank(1))
    seen = []
    mixer.in_proj.register_forward_hook(lambda _module, _args, output: seen.append(output.shape[-1]))
    torch.testing.assert_close(mixer(hidden), expected)
    assert (seen, forward.is_partial) == ([3 * SMALL["hidden_size"]], False)
