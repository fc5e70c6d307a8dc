"""Layers are found by the dry run, without a policy: models train over a pipeline as in one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import Case, Setting, assert_equals_one_process
from matrix import matrix
from model_zoo.transformers_build import from_config
from torch import nn

from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_hybrid.pipeline.find_layers import find_layers
from booster_testing.compare import Tolerance, tolerance_for

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
_LATENT = {
    **_SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_ROUTED = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_BART = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
    "dropout": 0.0,
    "use_cache": False,
}
FAMILIES = {
    "deepseek_v2": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**_LATENT, **_ROUTED, "topk_method": "greedy"},
    ),
    "minicpm3": ("MiniCPM3Config", "MiniCPM3ForCausalLM", {**_LATENT, "dim_model_base": 16}),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            **_SIZES,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 32,
            "head_dim": 8,
            "attn_temperature_tuning": False,  # counts positions in each layer, which split sequences refuse
        },
    ),
    "roberta": (
        "RobertaConfig",
        "RobertaForMaskedLM",
        {**_SIZES, "max_position_embeddings": 40, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "bart": ("BartConfig", "BartForConditionalGeneration", _BART),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    ),
    "gpt_neo": (
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_layers": 4,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 4,
            "max_position_embeddings": 32,
            "intermediate_size": 64,
            "use_cache": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "embed_dropout": 0.0,
            "attention_dropout": 0.0,
            "resid_dropout": 0.0,
        },
    ),
    "mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "state_size": 4,
            "num_hidden_layers": 4,
            "use_cache": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
}


def family(name):
    config, model, sizes = FAMILIES[name]
    torch.manual_seed(11)
    built = from_config(config, model, **sizes)().train().double()
    built.config._experts_implementation = "eager"  # the grouped kernel has no fp64
    return built


def tokens(number=0, replica=0):
    numbers = torch.randint(3, 64, (4, 8), generator=torch.Generator().manual_seed(2 + 10 * number + replica))
    return {"input_ids": numbers, "labels": numbers}


def held(_booster, model, _optimizer):
    return sum(parameter.numel() for parameter in model.unwrap().parameters())


def assert_pipeline_trains(case, options):
    """Train in a pipeline as one process does, a microbatch at a time; return which share each rank holds."""
    settings = {"pp_size": 2, "num_microbatches": 2, "example_batch": case.batch(0, 0), **options}
    setting = Setting(HybridParallelPlugin, settings)
    found = assert_equals_one_process(case, setting, parts=settings["num_microbatches"], tell=held)
    return [count / sum(parameter.numel() for parameter in case.make()[0].parameters()) for count in found]


def family_case(name):
    """Return a step in fp64, whose loss alone is taken in fp32."""
    no_effect = {"bart": ("*.k_proj.bias",), "roberta": ("*.key.bias",)}.get(name, ())  # keys that are not rotated
    precise = {"tolerance": tolerance_for(torch.float64), "loss_atol": 1e-6}
    return Case(build=partial(family, name), batch=tokens, steps=1, no_effect=no_effect, **precise)


@matrix(["deepseek_v2", "bart", "gpt_neo", "mamba"], name=FAMILIES)
def test_families_without_a_policy_train_as_one_process(name):
    assert min(assert_pipeline_trains(family_case(name), {})) < 1.0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def sequential():
    return nn.Sequential(nn.Linear(6, 4), Block(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), Block(), nn.Linear(4, 3))


def tokens_in_sequence():
    return nn.Sequential(nn.Embedding(16, 4), Block(), nn.LayerNorm(4), Block(), nn.Flatten(0, 1), nn.Linear(4, 3))


class Named(nn.Module):
    """Keeps its layers in a `ModuleDict`, and calls them in another order."""

    def __init__(self):
        super().__init__()
        self.entry = nn.Linear(6, 4)
        self.steps = nn.ModuleDict({"last": Block(), "first": Block(), "second": Block()})
        self.heads = nn.ModuleDict({"one": nn.Linear(4, 3), "two": nn.Linear(4, 3)})

    def forward(self, x):
        x = self.entry(x)
        for name in ("first", "second", "last"):
            x = self.steps[name](x)
        return sum(head(x) for head in self.heads.values())


class Pairs(nn.Module):
    """Its layers take and return one tuple of two streams."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(4, 4), nn.Linear(5, 5)
            self.mixed = nn.Linear(4, 5)

        def forward(self, streams):
            x, y = streams
            y = torch.tanh(self.right(y) + self.mixed(x))
            return torch.tanh(self.left(x)) + y[..., :4], y

    def __init__(self):
        super().__init__()
        self.entry, self.other = nn.Linear(6, 4), nn.Linear(6, 5)
        self.blocks = nn.ModuleList(self.Layer() for _ in range(4))

    def forward(self, x):
        streams = self.entry(x), self.other(x)
        for block in self.blocks:
            streams = block(streams)
            streams = [streams[0] * 2, streams[1] + 1]
        return torch.cat([*streams], -1)


class TwoArguments(Pairs):
    """Its layers take two streams and return them swapped, with a mask that stays as it is."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, y, *, mask):
            return torch.tanh(self.right(y)) * mask, torch.tanh(self.left(x)) + y, mask

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(6, 4)

    def forward(self, x):
        left, right, mask = self.entry(x), self.other(x), (x > 0).any(-1, keepdim=True)
        for block in self.blocks:
            left, right, mask = block(left, right, mask=mask)
        return torch.cat([left, right], -1)


class Narrowing(nn.Module):
    """Layers of changing widths, with what joins them in between, and lists of lists."""

    class Stage(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.widen = nn.Linear(width, 2 * width)
            self.blocks = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.Linear(2 * width, 2 * width))

        def forward(self, x):
            return self.blocks(torch.tanh(self.widen(x)))

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([self.Stage(6), self.Stage(12), self.Stage(24)])
        self.norms = nn.ModuleList([nn.LayerNorm(12), nn.LayerNorm(24), nn.LayerNorm(48)])

    def forward(self, x):
        for stage, norm in zip(self.stages, self.norms, strict=True):
            x = norm(stage(x)).view(len(x), -1)
        return x


class Starred(nn.Module):
    """Its layers take any number of tensors."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, *streams):
            return tuple(torch.tanh(self.linear(stream)) for stream in streams)

    def __init__(self):
        super().__init__()
        self.entry = nn.Linear(6, 4)
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))

    def forward(self, x):
        x = self.entry(x)
        streams = x, x * x
        for layer in self.layers:
            streams = layer(*streams)
        return streams[0] + streams[1]


def in_fp64(kind):
    return kind().double()


def rows(name, number, replica):
    generator = torch.Generator().manual_seed(4 + 10 * number + replica)
    return {name: torch.randn(4, 6, generator=generator, dtype=torch.float64)}


def numbers(number, replica):
    return {"input": torch.randint(16, (4, 1), generator=torch.Generator().manual_seed(4 + 10 * number + replica))}


BATCHES = {"sequential": partial(rows, "input"), "embedding": numbers}
KINDS = {
    "sequential": sequential,
    "embedding": tokens_in_sequence,
    "dict": Named,
    "pairs": Pairs,
    "two_arguments": TwoArguments,
    "widths": Narrowing,
    "starred": Starred,
}


def case_of(kind):
    build, batch = partial(in_fp64, KINDS[kind]), BATCHES.get(kind, partial(rows, "x"))
    return Case(build=build, batch=batch, steps=2, tolerance=tolerance_for(torch.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_plain_models_train_as_one_process(kind):
    assert max(assert_pipeline_trains(case_of(kind), {})) < 1.0


@pytest.mark.parametrize("kind", ["sequential", "pairs", "widths"])
def test_plain_models_are_cut_into_more_stages(kind):
    assert_pipeline_trains(case_of(kind), {"pp_style": "zbv", "num_microbatches": 4})


BY_ELEMENTS = {
    "tolerance": Tolerance(relative=1e-9, reason="softmaxes and norms are taken in fp32, over other parts of a batch"),
    "elements": (1e-6, 1e-9),  # of some families the routers compute in fp32, too
}


def split_sequences(mode):
    options = {"sp_size": 2, "sequence_parallelism_mode": mode, "example_batch": tokens()}
    return Setting(HybridParallelPlugin, options)


SPLIT_DEFAULT = (("bart", "all_to_all"), ("llama4", "ring_attn"), ("gpt_neo", "all_to_all"), ("mamba", "ring_attn"))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=[] if (name, mode) in SPLIT_DEFAULT else [pytest.mark.slow])
        for name in FAMILIES
        for mode in ("all_to_all", "ring_attn")
    ],
)
def test_sequences_of_families_without_a_policy_train_as_one_process(name, mode):
    assert_equals_one_process(replace(family_case(name), **BY_ELEMENTS), split_sequences(mode))


class Branches(nn.Module):
    """Has lists whose members are no layers."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.again = nn.ModuleList([nn.Linear(4, 4)])
        self.unused = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x):
        x = self.again[0](self.again[0](x))
        return sum(head(x) for head in self.heads)


def test_what_is_no_list_of_layers_is_told_with_its_reason():
    found = (
        r"Branches has no list of layers that run one after the other.* 'heads' \(what 'heads\.1' is given does not "
        r"depend on what 'heads\.0' returns\), 'again' \('again\.0' is called 2 times\), 'unused' \(no member is called"
    )
    with pytest.raises(ConfigError, match=found):
        find_layers(Branches(), {"x": torch.ones(2, 4)}, 2)


def test_too_few_layers_are_told_with_their_lists():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=r"2 layers can't fill 4 stages \(Sequential has 2 in ''\)"):
        find_layers(model, torch.ones(2, 4), 4)


@pytest.mark.parametrize(
    ("make", "batch", "num_stages", "lists"),
    [
        (sequential, {"input": torch.ones(2, 6)}, 2, [""]),
        (Named, {"x": torch.ones(2, 6)}, 2, ["steps"]),
        (Narrowing, {"x": torch.ones(2, 6)}, 3, ["stages"]),
        (Narrowing, {"x": torch.ones(2, 6)}, 4, ["stages.0.blocks", "stages.1.blocks", "stages.2.blocks"]),
    ],
    ids=["root", "dict", "outermost", "inner"],
)
def test_the_outermost_lists_that_fill_all_stages_are_chosen(make, batch, num_stages, lists):
    assert find_layers(make(), batch, num_stages) == lists
