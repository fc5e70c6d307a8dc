"""What two ranks take: memory of the device and pinned memory, and what is kept for backward."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import device_smoke
import torch
from device_runs.cases import Case, Figure

import booster_core
from device_speed.language_models import boosted_step, make_batch, make_llama, make_optimizer, make_plugin, size_of
from device_speed.measuring import forget

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from device_runs.cases import Setting
    from torch import Tensor


def memory(setting: Setting, *, engine: str) -> Sequence[Figure]:
    """Train a Llama of 300M for three steps, and measure what it takes on the device and in pinned memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 16}
    length = 1024
    if not setting.is_real:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        length = 16
    config = LlamaConfig(vocab_size=32768 if setting.is_real else 64, num_key_value_heads=4, use_cache=False, **sizes)
    tokens = torch.randint(config.vocab_size, (1, length), device=setting.device)
    mask = torch.ones_like(tokens)

    def make_model() -> Any:
        with torch.device(setting.device):  # the CPU takes long to draw its parameters
            return LlamaForCausalLM(config)

    train_step = _engine(setting, engine, make_model)
    setting.module.empty_cache()
    for step in range(3):
        if step == 2:
            setting.module.synchronize()
            setting.module.reset_peak_memory_stats()
        train_step({"input_ids": tokens, "attention_mask": mask, "labels": tokens})
    setting.module.synchronize()
    allocated, reserved = setting.module.max_memory_allocated(), setting.module.memory_reserved()
    if setting.is_real:
        reserved = setting.module.max_memory_reserved()
    figures = [
        Figure(f"most memory allocated in a step, 300M, {engine}", [float(allocated)], unit="B"),
        Figure(
            f"memory reserved, 300M, {engine}", [float(reserved)], "allocated", [float(allocated)], unit="B", bar=1.15
        ),
    ]
    pinned = setting.module.host_memory_stats().get("allocated_bytes.peak") if setting.is_real else None
    if pinned is not None:
        figures.append(Figure(f"pinned memory of torch's allocator, 300M, {engine}", [float(pinned)], unit="B"))
    return figures


def split_between_blocks(setting: Setting) -> Sequence[Figure]:
    """Measure what forward keeps for backward with sequences split between blocks, against tensor parallelism alone."""
    size = size_of(setting, "500M")
    batch = make_batch(setting, size)
    kept, losses = [], []
    for is_split in (True, False):
        model = make_llama(setting, size)
        booster = booster_core.Booster(
            setting.device, "pure-bf16", make_plugin("hybrid", tp_size=2, sequence_parallel=is_split)
        )
        model, optimizer, *_ = booster.boost(model, make_optimizer(model))
        step = boosted_step(booster, model, optimizer)
        for _ in range(2):
            step(batch)
        setting.module.synchronize()
        before = setting.module.memory_allocated()
        loss = model(**batch).loss
        setting.module.synchronize()
        kept.append(setting.module.memory_allocated() - before)
        losses.append(float(loss.detach()))
        booster.backward(loss, optimizer)
        del model, optimizer, step, loss
        forget(setting)
    assert abs(losses[0] - losses[1]) <= 2**-6 * abs(losses[1]), losses
    assert kept[0] < kept[1], kept
    what = "kept for backward with sequences split between blocks, Llama 500M, 2 ranks"
    return [Figure(what, [kept[0]], "tensor parallel alone", [kept[1]], "B", bar=0.9)]


def _engine(setting: Setting, engine: str, make_model: Callable[[], Any]) -> Callable[[dict[str, Tensor]], None]:
    torch.manual_seed(0)
    plugin, options = {
        "fsdp": ("fsdp", {}),
        "zero 2": ("zero", {"stage": 2}),
        "gemini": ("gemini", {}),
    }[engine]
    module, name = device_smoke.PLUGINS[plugin].split(":")
    booster = booster_core.Booster(setting.device, "bf16", getattr(import_module(module), name)(**options))
    model = make_model()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-4))

    def step(batch: dict[str, Tensor]) -> None:
        booster.backward(model(**batch).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return step


ENGINES = ("fsdp", "zero 2", "gemini")
CASES = [
    *(
        Case(f"memory of a Llama of 300M, {engine}, 2 ranks", memory, {"engine": engine}, ranks=2, is_timed=True)
        for engine in ENGINES
    ),
    Case("memory of sequences split between blocks, 2 ranks", split_between_blocks, ranks=2, is_timed=True),
]
