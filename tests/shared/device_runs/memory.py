"""Memory that a step takes, against what ``booster plan`` predicts, and what the allocator takes on top of it."""

import gc
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import torch
from device_smoke import make_plugin

from device_runs.cases import Case, Figure
from device_runs.small import STRATEGIES

WITHIN = 0.05
MAX_RESERVED = 1.15
STEPS = 3
SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "110M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
}
SIZES["110M, little batch"] = SIZES["110M"]
BATCH = {"tiny": (2, 32), "110M": (4, 1024), "110M, little batch": (1, 64), "1B": (4, 1024)}
"""With a little one, the optimizer makes the peak."""


def make_llama(size):
    """Return a Llama of about so many parameters, on torch's default device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary = 256 if size == "tiny" else 32000
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, use_cache=False, **SIZES[size]))


def batch_of(size, device="cpu"):
    """Return a batch with labels."""
    tokens = torch.arange(BATCH[size][0] * BATCH[size][1]).view(BATCH[size]) % 251
    return {name: tokens.to(device) for name in ("input_ids", "labels")}


def compare_with_plans(setting, *, size):
    """Measure the peak of a step in bf16 under each plugin, and compare with predictions, made on the CPU meanwhile."""
    size = size if setting.is_real else "tiny"
    figures = []
    names = ("ddp", "fsdp", "zero 1", "zero 2", "gemini", "hybrid") if setting.is_real else ("zero 1", "gemini")
    processes = max((os.cpu_count() or 1) // 4, 1)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        plans = {name: pool.submit(plan, name, size) for name in names}
        for name in names:
            peak, reserved = measure(setting, name, size)
            planned = plans[name].result()
            what = f"peak under {name}, Llama {size}"
            figures += [
                Figure(f"planned {what}", [planned], "measured", [peak], unit="B", bar=1 + WITHIN),
                Figure(f"measured {what}", [peak], "planned", [planned], unit="B", bar=1 + WITHIN),
                Figure(f"reserved at the {what}", [reserved], "allocated", [peak], unit="B", bar=MAX_RESERVED),
            ]
    return figures if setting.is_real else []


def plan(name, size):
    """Return the predicted peak in bytes."""
    from booster_tools.planning import TrainingStep, shares_of, simulate

    torch.set_num_threads(1)
    strategy = STRATEGIES[name]

    def build():
        model = make_llama(size)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)

    step = TrainingStep(build=build, share=shares_of(lambda: batch_of(size)), mixed_precision="bf16")
    return simulate(step, make_plugin(strategy.plugin, strategy.options), 1).peak_bytes


def measure(setting, name, size):
    """Return the most that a step has allocated, and reserved, in bytes."""
    module = setting.module
    gc.collect()
    module.empty_cache()
    module.synchronize()
    before = module.memory_allocated()
    with torch.device(setting.device):
        torch.manual_seed(0)
        model = make_llama(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    booster = STRATEGIES[name].make_booster(setting.device, "bf16")
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    del model
    batch = batch_of(size, setting.device)
    for step in range(STEPS):
        if step == STEPS - 1:
            module.synchronize()
            module.empty_cache()  # what `boost` has left
            module.reset_peak_memory_stats()
        booster.backward(boosted(**batch).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    module.synchronize()
    peak = module.max_memory_allocated() - before
    return peak, module.max_memory_reserved() - before if setting.is_real else peak


CASES = [
    Case("memory against the plan: Llama 110M", compare_with_plans, {"size": "110M"}, seconds=150),
    Case("memory against the plan: little batch", compare_with_plans, {"size": "110M, little batch"}, seconds=150),
    Case("memory against the plan: Llama 1B", compare_with_plans, {"size": "1B"}, seconds=240),
]
