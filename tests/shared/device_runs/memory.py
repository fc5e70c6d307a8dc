"""Memory that a step takes, against what ``booster plan`` predicts, and what the allocator takes on top of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from booster_core import Booster
from device_runs.cases import Case, Figure
from device_runs.small import make_plugin

if TYPE_CHECKING:
    from torch import Tensor, nn

    from device_runs.cases import Setting

WITHIN = 0.05
MAX_RESERVED = 1.15
STEPS = 3
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "110M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
}
BATCH = {"tiny": (2, 32), "110M": (4, 1024), "1B": (4, 1024)}
PLUGINS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "fsdp": ("fsdp", {}),
    "zero 1": ("zero", {"stage": 1}),
    "zero 2": ("zero", {"stage": 2}),
    "gemini": ("gemini", {}),
    "hybrid": ("hybrid", {"zero_stage": 1}),
}


def make_llama(size: str) -> nn.Module:
    """Return a Llama of about so many parameters, on torch's default device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary = 256 if size == "tiny" else 32000
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, use_cache=False, **SIZES[size]))


def batch_of(size: str, device: str = "cpu") -> dict[str, Tensor]:
    """Return a batch with labels."""
    tokens = torch.arange(BATCH[size][0] * BATCH[size][1]).view(BATCH[size]) % 251
    return {name: tokens.to(device) for name in ("input_ids", "labels")}


def compare_with_plan(setting: Setting, *, plugin: str, options: dict[str, Any], size: str) -> list[Figure]:
    """Measure the peak of a step in bf16, and compare with the prediction, which is made on the CPU."""
    from booster_tools.planning import predict

    size = size if setting.is_real else "tiny"
    module = setting.module
    module.synchronize()
    before = module.memory_allocated()
    with torch.device(setting.device):
        torch.manual_seed(0)
        model = make_llama(size)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    booster = Booster(setting.device, "bf16", make_plugin(plugin, options))
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    batch = batch_of(size, setting.device)
    for step in range(STEPS):
        if step == STEPS - 1:
            module.synchronize()
            module.reset_peak_memory_stats()
        booster.backward(boosted(**batch).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    module.synchronize()
    peak = module.max_memory_allocated() - before
    reserved = module.max_memory_reserved() - before if setting.is_real else peak

    def build() -> tuple[Any, ...]:
        planned = make_llama(size)
        return planned, torch.optim.AdamW(planned.parameters(), lr=1e-4)

    planned = predict(build, lambda: batch_of(size), make_plugin(plugin, options), 1, mixed_precision="bf16")
    print(planned)
    name = f"peak of {plugin} {options or ''}, Llama {size}"
    figures = [
        Figure(f"planned {name}", [planned.peak_bytes], "measured", [peak], unit="B", bar=1 + WITHIN),
        Figure(f"measured {name}", [peak], "planned", [planned.peak_bytes], unit="B", bar=1 + WITHIN),
        Figure(f"reserved, {name}", [reserved], "allocated", [peak], unit="B", bar=MAX_RESERVED),
    ]
    return figures if setting.is_real else []


CASES = [
    Case(
        f"memory of Llama {size}: {name}",
        compare_with_plan,
        {"plugin": plugin, "options": options, "size": size},
        seconds=120,
        is_timed=size == "1B",  # so that it has the device to itself
    )
    for size, names in (("110M", tuple(PLUGINS)), ("1B", ("zero 1", "gemini", "fsdp")))
    for name, (plugin, options) in PLUGINS.items()
    if name in names
]
