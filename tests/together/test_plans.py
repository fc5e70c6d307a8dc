"""What a plan predicts in one process is what ranks hold and send."""

import contextlib
import gc
import resource
import time
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from matrix import matrix
from residual_stack import Stack
from torch import Tensor, nn

from booster_core.errors import ConfigError, GradientError
from booster_core.plugin import load
from booster_hybrid import ShardingPolicy
from booster_hybrid.expert_parallel.exchange import assuming_balanced_experts
from booster_testing import run_on_ranks
from booster_tools import TrainingFunctions
from booster_tools.planning import Candidate, Devices, TrainingStep, measure, plan, shares_of, simulate

SETTINGS = {
    "ddp": ("ddp", {}),
    "ddp, views": ("ddp", {"gradient_as_bucket_view": True}),
    "zero 1": ("zero", {"stage": 1}),
    "zero 2": ("zero", {"stage": 2}),
    "fsdp": ("fsdp", {}),
    "fsdp, kept": ("fsdp", {"reshard_after_forward": False}),
    "gemini": ("gemini", {"min_chunk_bytes": 2**20}),
    "hybrid": ("hybrid", {}),
    "hybrid, tensors": ("hybrid", {"tp_size": 2}),
    "hybrid, tensors, zero": ("hybrid", {"tp_size": 2, "zero_stage": 1}),
    "hybrid, zero 3": ("hybrid", {"zero_stage": 3}),
}
STAGES = {
    "1f1b": ({"pp_size": 2, "num_microbatches": 4}, 2, 1 / 5, 2),
    "gpipe, zero": ({"pp_size": 2, "pp_style": "gpipe", "num_microbatches": 4, "zero_stage": 1}, 4, 1 / 5, 4),
    "interleaved": ({"pp_size": 2, "pp_style": "interleaved", "num_microbatches": 4}, 2, 1 / 9, 2.5),
    "tensors": ({"pp_size": 2, "tp_size": 2}, 4, 1 / 3, 2),
}
"""Options, ranks, the part of a step that a rank waits, and the most microbatches whose activations it keeps."""
SIZES = {
    "1M": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 2000},
    "25M": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "vocab_size": 6000},
    "110M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 16000},
}


def llama(size, **options):
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False}
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES[size], **heads, **options}))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def tokens():
    ids = torch.arange(8 * 32).reshape(8, 32) % 1000
    return {"input_ids": ids, "labels": ids}


def small_tokens():
    ids = torch.arange(8 * 128).reshape(8, 128) % 64
    return {"input_ids": ids, "labels": ids}


def training(build, batch, **options):
    return TrainingStep(build=build, share=shares_of(batch), **options)


def trained(settings, size):
    """Return what this rank holds and sends under each setting, and the size of all tensors that Python can see."""
    found, step = [], torch.optim.AdamW.step

    def step_and_count(self, *args, **kwargs):
        result = step(self, *args, **kwargs)
        held.append(_held(before))
        return result

    for name, options in map(SETTINGS.get, settings):
        gc.collect()
        before, held = [each for each in gc.get_objects() if isinstance(each, Tensor)], []
        with mock.patch.object(torch.optim.AdamW, "step", step_and_count):
            measured = measure(training(lambda: llama(size), tokens), load(name)(**options))
        found.append((measured, held[-1]))
    return found


def _held(before):
    """Return the bytes of tensors that were not there before."""
    known = {id(each) for each in before}
    gc.collect()
    sizes = {}
    for each in gc.get_objects():
        if isinstance(each, Tensor) and id(each) not in known and each.device.type == "cpu":
            with contextlib.suppress(RuntimeError, ConfigError, GradientError):  # wrappers and stand-ins have no memory
                storage = each.untyped_storage()
                if storage.data_ptr():
                    sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def compare(settings, size, world_size):
    """Compare plans with runs; the size of tensors is counted without any of the plan's code."""
    ranks = run_on_ranks(trained, world_size, settings, size)
    for index, setting in enumerate(settings):
        name, options = SETTINGS[setting]
        predicted = simulate(training(lambda: llama(size), tokens, on_host=True), load(name)(**options), world_size)
        measured, held = ranks[0][index]
        assert predicted.traffic == measured.traffic, setting
        assert predicted.traffic, setting
        assert predicted.flops == measured.flops, setting
        assert predicted.state_bytes == pytest.approx(measured.state_bytes, rel=0.05), setting
        assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.1), setting
        assert predicted.state_bytes + predicted.other_bytes == pytest.approx(held, rel=0.05), setting


def test_predicted_bytes_are_those_of_ranks():
    compare(["zero 1", "hybrid, tensors"], "1M", 2)


@pytest.mark.slow
@pytest.mark.parametrize("setting", list(SETTINGS))
@pytest.mark.parametrize(("size", "world_size"), [("25M", 2), ("25M", 4), ("110M", 2)])
def test_predicted_bytes_of_every_plugin_are_those_of_ranks(size, world_size, setting):
    compare([setting], size, world_size)


def equal_layers():
    return llama("1M", num_hidden_layers=8, vocab_size=64)


def trained_stages(options):
    return measure(training(equal_layers, small_tokens), load("hybrid")(**options))


@matrix(["1f1b"], setting=list(STAGES))
def test_stages_are_equal_parts_of_the_model(setting):
    options, world_size, idle, in_flight = STAGES[setting]
    plugin = load("hybrid")(**options)
    planned = simulate(training(equal_layers, small_tokens, on_host=True), plugin, world_size)
    ranks = run_on_ranks(trained_stages, world_size, options)
    assert (planned.num_stages, planned.idle_share) == (2, pytest.approx(idle))
    assert plugin.pipeline_costs(options.get("num_microbatches", 2))[1] == in_flight

    def mean(figure):
        return pytest.approx(sum(map(figure, ranks)) / world_size, rel=0.05)

    assert planned.flops == mean(lambda each: each.flops)
    assert planned.parameter_bytes == mean(lambda each: each.parameter_bytes)
    assert planned.optimizer_bytes == mean(lambda each: each.optimizer_bytes)
    # Gradients of stages are out of sight in a run, where they count as what else is held.
    assert planned.state_bytes + planned.other_bytes == mean(lambda each: each.state_bytes + each.other_bytes)
    if world_size > 2:
        assert planned.sent_bytes == mean(lambda each: each.sent_bytes - each.traffic["send"].sent_bytes)
    assert planned.peak_bytes == pytest.approx(max(each.peak_bytes for each in ranks), rel=0.25)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero_stage": 3}, "Plan `zero_stage=2`"),
        ({"checkpoint_ratio": 1.0}, "`checkpoint_ratio=1.0` can't be planned"),
    ],
)
def test_stages_that_are_no_parts_of_the_model_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        simulate(training(equal_layers, small_tokens), load("hybrid")(pp_size=2, **options), 2)


def experts():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "tie_word_embeddings": False}
    config = Qwen3MoeConfig(vocab_size=1000, **sizes, **heads, num_experts=4, num_experts_per_tok=2, use_cache=False)
    model = Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("grouped_mm")
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def measured_experts():
    """Count a step of two ranks with as many tokens for each expert, whatever the router says."""
    with assuming_balanced_experts():
        return measure(training(experts, tokens), load("hybrid")(ep_size=2))


def test_spread_experts_are_planned_with_equally_many_tokens():
    measured = run_on_ranks(measured_experts, 2)
    step = training(experts, tokens, on_host=True)
    for rank in range(2):
        planned = simulate(step, load("hybrid")(ep_size=2), 2, rank)
        assert planned.traffic == measured[rank].traffic
        assert planned.traffic["all_to_all"].calls > 2
        assert planned.flops == measured[rank].flops
        assert planned.state_bytes == pytest.approx(measured[rank].state_bytes, rel=0.05)
        assert planned.peak_bytes == pytest.approx(measured[rank].peak_bytes, rel=0.1)
        assert planned.assumed == "as many tokens choose each expert"


@matrix(["zero"], name=["ddp", "zero"])  # others hold as much in backward, where they gather
def test_plans_step_as_accelerators_do(name):
    """By default on all parameters at once, with one more tensor for each; on the CPU one after the other."""

    def deep(**options):
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(20)))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, **options)

    def peak(*, on_host=False, **given):
        batch = partial(torch.zeros, 4, 128)
        options = {"criterion": lambda outputs, _: outputs.square().mean(), "on_host": on_host}
        return simulate(training(lambda: deep(**given), batch, **options), load(name)(), 1).peak_bytes

    num_bytes = 4 * sum(parameter.numel() for parameter in deep()[0].parameters())
    assert peak() == peak(foreach=True)
    assert peak() > peak(foreach=False) + num_bytes // 2
    assert peak(fused=True) < peak() - num_bytes // 2
    assert peak(on_host=True) == peak(foreach=False)


def test_plans_of_pipelines_may_follow_each_other():
    def build():
        model = Stack()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    options = {"custom_policy": ShardingPolicy(layers=("layers",)), "example_batch": torch.zeros(2, 8)}
    devices = Devices(number=4, memory_bytes=2**30)
    settings = [
        Candidate(name="hybrid", options={"pp_size": 2, "num_microbatches": 4, **options}),
        Candidate(name="hybrid", options={"pp_size": 4, **options}),
        Candidate(name="hybrid", options={"pp_size": 8, **options}),
        Candidate(name="ddp"),
    ]
    functions = TrainingFunctions(build, lambda: torch.zeros(16, 8), lambda outputs, _: outputs.square().mean())
    found = plan(functions, devices, settings=settings)
    sizes = {
        each.candidate.options.get("pp_size", 1): each.prediction.num_stages for each in found.settings if each.fits
    }
    assert sizes == {1: 1, 2: 2, 4: 4}
    assert "world size 4" in found.settings[-1].problem
    assert not dist.is_initialized()


@pytest.mark.slow
def test_a_model_of_70_billion_parameters_is_planned_in_little_memory_and_time():
    num_parameters = 70.55e9
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8}

    def tokens():
        ids = torch.zeros(1024, 2048, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

    step = training(lambda: llama("1M", **sizes, **heads), tokens, mixed_precision="bf16")
    started = time.process_time()  # of this process, whatever else the machine does
    found = simulate(step, load("fsdp")(), 1024)
    assert time.process_time() - started < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 8 * 2**20  # KiB
    assert found.state_bytes == pytest.approx(16 * num_parameters / 1024, rel=0.05)
    assert found.sent_bytes == pytest.approx((2 + 2 + 4) * num_parameters, rel=0.1)
