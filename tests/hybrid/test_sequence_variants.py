"""What models ask of attention besides: windows, capped scores, sinks, packed documents, other layers' routers."""

import contextlib
import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import (
    Case,
    Setting,
    assert_equals_one_process,
    assert_same_training,
    itself,
    recompute,
    train_boosted,
    train_plainly,
    zoo_case,
)
from flex_on_cpus import flex_on_cpus
from hybrid_runs import MODES, RING, SPLIT_GATHER, ULYSSES, padded_text
from isolated_libraries import import_quietly
from log_records import Records
from matrix import matrix, named
from model_zoo import get_model
from ranked import on_ranks

from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_hybrid.policy.base import ShardingPolicy
from booster_runtime import FirstFitDocuments, cu_seq_lens, full_gradient
from booster_testing import expect_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.models import tiny_llama
from booster_testing.training import whole_model

CLOSE = tolerance_for(torch.float32)

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "use_cache": False,
}
LINEAR = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_only_layers": [0, 1],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
VARIANTS = {
    "window": ("Mistral", {**SMALL, "sliding_window": 3}),
    "capped": (
        "Gemma2",
        {**SMALL, "head_dim": 8, "sliding_window": 3, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 2},
    ),
    "sinks": ("GptOss", {**SMALL, "head_dim": 8, "num_local_experts": 4, "sliding_window": 3}),
    "linear": ("Qwen3Next", {**SMALL, **LINEAR}),
}


def build(variant):
    import_quietly(("transformers",))
    import transformers

    family, settings = VARIANTS[variant]
    config = getattr(transformers, f"{family}Config")(**settings)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():  # also what starts as zeros
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def setting_of(options, num_ranks=2):
    policy = ShardingPolicy(layers=("model.layers",)) if "sp_size" in options else None
    return Setting(HybridParallelPlugin, {**options, "custom_policy": policy}, num_ranks)


LENGTHS = ((8, None), (9, "right"), (7, "left"), (2, None))


def of_lengths(number, _replica):
    return padded_text(number, *LENGTHS[number])


@matrix(
    ["window-all_to_all", "linear-ring_attn"],
    variant=VARIANTS,
    options=named([ULYSSES, RING], ["all_to_all", "ring_attn"]),
)
def test_attention_variants_work_on_split_sequences(variant, options):
    case = Case(build=partial(build, variant), batch=of_lengths, steps=len(LENGTHS))
    assert_equals_one_process(case, setting_of(options))


def packed(number, _replica):
    """Return documents after each other in one row, which see only themselves."""
    batch = padded_text(number, 12 + number)
    batch["labels"][:, 5] = -100  # the first of a document is nobody's next
    return {**batch, "position_ids": torch.cat([torch.arange(5), torch.arange(7 + number)]).expand(4, -1)}


PACKED = Case(build=partial(build, "window"), batch=packed, steps=2, outputs=True)


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_packed_documents_train_as_separate_ones(options):
    assert_equals_one_process(PACKED, setting_of(options))


@pytest.mark.parametrize(("options", "size"), [(ULYSSES, 12), (RING, 6)], ids=["all_to_all", "ring_attn"])
@on_ranks(2, timeout_seconds=120)
def test_packed_documents_train_by_flex_attention(options, size):
    with contextlib.ExitStack() as stack:
        calls = []

        def attend_by_flex(step, _model, _optimizer):
            if step == 0:  # the check at `boost` attends otherwise
                calls.append(stack.enter_context(flex_on_cpus()))

        trained = train_boosted(replace(PACKED, outputs=False, before_step=attend_by_flex), setting_of(options)).trained
    assert_same_training(trained, train_plainly(PACKED, 1), PACKED)
    assert calls[0][0] == (size, size)


FITTED = {
    "all_to_all": ULYSSES,
    "ring_attn": RING,
    "split_gather": SPLIT_GATHER,
    "tp": {"tp_size": 2},
    "pp": {"pp_size": 2, "num_microbatches": 2},
    "dp": {"zero_stage": 1},
    "dp and ring": {**RING, "zero_stage": 2},
}


@matrix(["all_to_all", "ring_attn", "pp"], options=named(FITTED.values(), FITTED))
@on_ranks(lambda options: 4 if options.get("zero_stage") == 2 else 2, timeout_seconds=120)
def test_rows_by_first_fit_train_as_documents_alone(options):
    lengths = torch.Generator().manual_seed(3)
    documents = [
        torch.randint(3, 64, (int(length),), generator=lengths).tolist()
        for length in torch.randint(1, 12, (60,), generator=lengths)
    ]
    fitted = list(FirstFitDocuments(documents, 16, window=8, step_rows=4))

    def two_rows(number, replica):
        rows = fitted[4 * number + 2 * replica :][:2]
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}

    def llama_of_documents():
        """Return a model that runs each document alone, whole and without padding: the mean loss of their tokens."""
        model = tiny_llama()
        whole = model.forward

        def forward(input_ids, position_ids, labels):
            sums, count = 0.0, 0
            for tokens, positions, wanted in zip(input_ids, position_ids, labels, strict=True):
                for start, stop in itertools.pairwise(cu_seq_lens(positions)["cu_seq_lens_q"].tolist()):
                    if number := int((wanted[start:stop] != -100).sum()):
                        loss = whole(input_ids=tokens[None, start:stop], labels=wanted[None, start:stop]).loss
                        sums, count = sums + number * loss, count + number
            return sums / count

        model.forward = forward
        return model

    packed = Case(build=tiny_llama, batch=two_rows, steps=2)
    result = train_boosted(packed, Setting(HybridParallelPlugin, options))
    apart = Case(build=llama_of_documents, batch=two_rows, loss=itself, steps=2)
    assert_same_training(result.trained, train_plainly(apart, result.num_replicas), packed)


def mixtral(asked):
    import_quietly(("transformers",))
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4, output_router_logits=asked == "config"))


def routed(asked, _number, _replica):
    return {**padded_text(0, 8, "right"), **({"output_router_logits": True} if asked == "call" else {})}


def mixture(asked):
    return Case(build=partial(mixtral, asked), batch=partial(routed, asked), steps=1)


@matrix(1, options=named([ULYSSES, RING], ["all_to_all", "ring_attn"]), asked=["config", "call"])
def test_balancing_experts_over_parts_of_a_batch_is_refused(options, asked):
    message = "`output_router_logits=True` balances experts over the positions of a whole batch"
    expect_on_ranks(ConfigError, message, train_boosted, 2, mixture(asked), setting_of(options))


def test_split_gather_balances_experts_over_the_whole_batch():
    assert_equals_one_process(mixture("config"), setting_of(SPLIT_GATHER))


class Mixing(torch.nn.Module):
    """Sees the positions before each one, under a name of its own."""

    def __init__(self, block):
        super().__init__()
        self.block, self.taps = block, torch.nn.Parameter(torch.ones(32, 1, 3))

    def forward(self, hidden):
        shifted = torch.nn.functional.pad(hidden.mT, (2, 0))
        return self.block(hidden) + torch.nn.functional.conv1d(shifted, self.taps, groups=32).mT


def mixing(kind):
    model = build("window")
    layers = model.model.layers
    if kind != "own layer":
        layers[1].mlp = Mixing(layers[1].mlp)
    if kind.startswith("own layer"):
        layers[0] = MixingLayer(layers[0], 1.0 if kind == "own layer" else 1e-5)
    return model


def mixing_case(kind):
    hook = recompute if kind == "checkpointed" else None
    return Case(build=partial(mixing, kind), batch=of_lengths, steps=2, before_step=hook)


def train_two_lengths_at_once(booster, model, optimizer):
    """Compare a backward of two batches, which are recomputed in the other order; return what a `boost` says."""
    whole = mixing("plain")
    whole.load_state_dict(whole_model(booster, model))
    sum(whole(**of_lengths(number, 0)).loss for number in range(2)).backward()
    booster.backward(sum(model(**of_lengths(number, 0)).loss for number in range(2)), optimizer)
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    assert_same_tensors({name: full_gradient(booster, model, name) for name in expected}, expected, CLOSE)
    with Records() as records:
        booster.boost(mixing("plain"))
    return [text for text in records.texts if "Mixing mix positions of a sequence outside of attention" in text]


@matrix(1, options=named([ULYSSES, RING], ["all_to_all", "ring_attn"]), kind=["plain", "checkpointed"])
def test_parts_of_layers_that_convolve_positions_run_on_whole_sequences(options, kind):
    told = assert_equals_one_process(mixing_case(kind), setting_of(options), tell=train_two_lengths_at_once)
    assert [len(each) for each in told] == [1, 0]


class MixingLayer(torch.nn.Module):
    """A layer whose own code sees other positions."""

    def __init__(self, layer, weight):
        super().__init__()
        self.layer, self.weight = layer, weight

    def forward(self, hidden_states, **given):
        return self.layer(hidden_states + self.weight * hidden_states.cumsum(1), **given)


@pytest.mark.parametrize("kind", ["own layer", "own layer, a little, and a part"])
def test_layers_whose_own_code_sees_other_positions_are_refused(kind):
    message = "changes what MistralForCausalLM computes"
    expect_on_ranks(ConfigError, message, train_boosted, 2, mixing_case(kind), setting_of(RING))


@matrix(["ring_attn"], options=named([ULYSSES, RING], ["all_to_all", "ring_attn"]))
@on_ranks(2)
def test_a_model_that_asks_for_flex_attention_attends_across_ranks(options):
    def with_flex_attention():
        model = get_model("transformers/llama").seeded()
        model.set_attn_implementation("flex_attention")
        return model

    case = zoo_case("transformers/llama", build=with_flex_attention, steps=1)
    result = train_boosted(case, Setting(HybridParallelPlugin, options))
    # Torch can't differentiate flex attention on the CPU.
    assert_same_training(result.trained, train_plainly(zoo_case("transformers/llama", steps=1), 1), case)
