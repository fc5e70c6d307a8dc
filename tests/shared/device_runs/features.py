"""What users combine with every plugin: compiled models, CUDA graphs, activations elsewhere, texts, adapters, files."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import device_smoke
import pytest
import torch
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_testing.compare import ADAPTIVE, EXACT, assert_same_tensors
from device_runs.cases import CannotRun, Case
from device_runs.parts import Part, case_of
from device_runs.small import (
    Decoder,
    Run,
    adamw,
    assert_same_bits,
    exact_sgd,
    make_plugin,
    repeat_bits,
    saved_parameters,
    tokens_of,
    under,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from device_runs.cases import Setting

STEPS = 6


# ---- compiled models


def train_compiled(setting: Setting, *, plugin: str, options: dict[str, Any], how: str, mode: str | None) -> None:
    """Train with compiled layers, or the whole compiled, and compare with a run that is not."""
    backend = _compiler(setting)
    repeat_bits()
    expected = _compiled_run(setting, plugin, options).train(STEPS)
    run = _compiled_run(setting, plugin, options)
    arguments: dict[str, Any] = {"backend": backend} if mode is None else {"backend": backend, "mode": mode}
    if how == "layers":
        for layer in run.booster.unwrap(run.model).layers:
            layer.compile(**arguments)
    else:
        run.model.compile(**arguments)
    losses = []
    for number in range(STEPS):
        if mode is not None:
            torch.compiler.cudagraph_mark_step_begin()
        losses.append(float(run.step(number)))
    # Fused kernels round less often: in bf16 a rounding of logits remains.
    close = [abs(a - b) <= 2**-6 * abs(b) for a, b in zip(losses, expected, strict=True)]
    assert all(close), (losses, expected)
    assert losses[-1] < 0.98 * losses[1], losses  # of the same tokens


def _compiled_run(setting: Setting, plugin: str, options: dict[str, Any]) -> Run:
    torch.manual_seed(0)
    model = Decoder(256, 2, 4) if setting.is_real else Decoder(32, 2, 2)
    return Run(setting, plugin, options, "bf16", model=model, make_optimizer=adamw)


def _compiler(setting: Setting) -> str:
    """Return the backend to compile by, which has compiled something."""
    if not setting.is_real:
        return "aot_eager"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # many cases compile at the same time
    x = torch.ones(1024, device=setting.device)
    try:
        found = torch.compile(lambda x: (x * 2 + 1).sin())(x)
    except Exception as error:
        msg = f"torch.compile does not work here: {type(error).__name__}: {str(error).splitlines()[0]}"
        raise CannotRun(msg) from error
    assert torch.allclose(found, (x * 2 + 1).sin())
    return "inductor"


# ---- CUDA graphs


def capture(setting: Setting, *, plugin: str, options: dict[str, Any]) -> None:
    """Forward, backward and step raise while a graph is captured, and training goes on as if nothing was."""
    repeat_bits()
    expected = Run(setting, plugin, options, make_optimizer=exact_sgd)
    losses = expected.train(4)
    run = Run(setting, plugin, options, make_optimizer=exact_sgd)
    found = run.train(2)
    tokens = tokens_of(2, setting.device)
    kept = run.model(tokens)
    torch.cuda.synchronize()
    for name, call in (
        ("forward", lambda: run.model(tokens)),
        ("backward", lambda: run.booster.backward(kept, run.optimizer)),
        ("step", run.optimizer.step),
    ):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(ConfigError, match=f"{name}.*while a CUDA graph"):
            _record(graph, stream, call)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
    run.booster.backward(kept, run.optimizer)
    run.optimizer.step()
    run.optimizer.zero_grad()
    found += [float(kept.detach()), float(run.step(3))]
    assert found == losses, (found, losses)
    assert_same_bits(run.parameters(), expected.parameters("expected"), "after captures that were refused")


def _record(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, call: Callable[[], object]) -> None:
    # Threads of NCCL ask for events meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        torch.ones(8, device="cuda").add_(1)
        call()


def capture_alone(setting: Setting) -> None:
    """A graph of what no plugin has boosted is none of our business."""
    model = nn.Linear(8, 8).to(setting.device)
    x = torch.ones(4, 8, device=setting.device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        model(x)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = model(x)
    x.mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    with torch.no_grad():
        assert torch.allclose(y, model(x))


# ---- activations


def keep_activations(setting: Setting, *, plugin: str, options: dict[str, Any], how: str) -> None:
    """Recomputed and offloaded activations give the bits of those that stay."""
    from booster_runtime import enable_activation_checkpointing
    from booster_runtime.activations import enable_activation_offload

    repeat_bits()
    plain = Run(setting, plugin, options, "bf16", make_optimizer=exact_sgd)
    expected = plain.train(4)
    run = Run(setting, plugin, options, "bf16", make_optimizer=exact_sgd)
    if how == "offloaded":
        chosen = enable_activation_offload(run.model, by="Layer", least_bytes=1 << 10)
    elif how == "recomputed":
        chosen = enable_activation_checkpointing(run.model, by="Layer")
    elif how == "recomputed, products kept":
        chosen = enable_activation_checkpointing(run.model, by="Layer", keep="expensive")
    else:
        chosen = enable_activation_checkpointing(run.model, by="Layer", offload=True)
    assert chosen
    assert run.train(4) == expected
    assert_same_bits(run.parameters(), plain.parameters("plain"), how)


def save_memory_by_offload(setting: Setting) -> None:
    """Activations on the host and recomputed ones take less of the device than those that stay."""
    from booster_runtime import enable_activation_checkpointing
    from booster_runtime.activations import enable_activation_offload

    def peak(change: Any) -> int:
        torch.manual_seed(0)
        run = Run(setting, "ddp", {}, "bf16", model=Decoder(512, 12, 8))
        if change is not None:
            assert change(run.model)
        tokens = torch.randint(256, (64, 64), device=setting.device)
        for number in range(3):
            if number == 2:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            run.booster.backward(run.model(tokens), run.optimizer)
            run.optimizer.zero_grad()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    stays = peak(None)
    moved = peak(lambda model: enable_activation_offload(model, by="Layer"))
    recomputed = peak(lambda model: enable_activation_checkpointing(model, by="Layer"))
    assert moved < 0.6 * stays, (moved, stays)
    assert recomputed < 0.6 * stays, (recomputed, stays)


# ---- texts, adapters, files


def generate(setting: Setting, *, plugin: str, options: dict[str, Any]) -> None:
    """Generate the tokens of the plain model, greedily and drawn."""
    prompt = torch.tensor([[3, 4, 5, 6, 7, 8, 9], [9, 8, 7, 6, 5, 4, 3]], device=setting.device)
    greedy = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    drawn = {**greedy, "do_sample": True}

    def texts(model: Any) -> list[Any]:
        found = [model.generate(prompt, attention_mask=torch.ones_like(prompt), **greedy)]
        torch.manual_seed(5)
        found.append(model.generate(prompt, attention_mask=torch.ones_like(prompt), **drawn))
        return [each.tolist() for each in found]

    expected = texts(_model_to_generate().to(setting.device))
    booster = Booster(setting.device, "fp32", make_plugin(plugin, options))
    model, *_ = booster.boost(_model_to_generate())
    assert texts(model.eval()) == expected


def _model_to_generate() -> nn.Module:
    """Return a model whose tokens are no tie: its weights are larger than those of a new one."""
    model = device_smoke.make_model().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10.0)
    return model


def save_pretrained(setting: Setting, *, plugin: str, options: dict[str, Any], is_lazy: bool) -> None:
    """Train a model from files, save it by its library's method, and find the parameters there."""
    from transformers import LlamaForCausalLM

    from booster_runtime import LazyInitContext

    first, second = setting.folder / "first", setting.folder / "second"
    device_smoke.make_model().save_pretrained(first)
    with LazyInitContext() if is_lazy else nullcontext():
        model = LlamaForCausalLM.from_pretrained(first)
    booster = Booster(setting.device, "bf16", make_plugin(plugin, options))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
    model, optimizer, *_ = booster.boost(model, optimizer)
    for step in range(2):
        batch = {name: each.to(setting.device) for name, each in device_smoke.batch_of(step).items()}
        booster.backward(model(**batch).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(second)
    found = {name: each.detach() for name, each in LlamaForCausalLM.from_pretrained(second).named_parameters()}
    saved = saved_parameters(booster, model, setting.folder / "model.safetensors")
    assert_same_tensors(found, {name: saved[name] for name in found}, EXACT)
    plain = LlamaForCausalLM.from_pretrained(first).to(setting.device)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-2)
    for step in range(2):
        batch = {name: each.to(setting.device) for name, each in device_smoke.batch_of(step).items()}
        with torch.autocast(setting.device, torch.bfloat16):
            loss = plain(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: each.detach().cpu() for name, each in plain.named_parameters()}
    largest = max(float((found[name] - each).abs().max()) for name, each in expected.items())
    # Two steps of AdamW move a parameter by at most 2 x 1e-2; gradients of bf16 differ by a few roundings.
    assert largest < 2e-3, largest


def train_lazy(setting: Setting, *, plugin: str, options: dict[str, Any]) -> None:
    """A lazy model gets the values of an eager one, bit for bit, also where they are drawn."""
    from booster_runtime import LazyInitContext

    found = []
    for is_lazy in (False, True):
        torch.manual_seed(11)
        with LazyInitContext() if is_lazy else nullcontext():
            model = Decoder(64, 2, 4)
        run = Run(setting, plugin, options, model=model, make_optimizer=exact_sgd)
        found.append(run.parameters(f"lazy {is_lazy}"))
    assert_same_bits(found[1], found[0], "lazy values")


def train_adapters(setting: Setting, *, plugin: str, options: dict[str, Any]) -> None:
    """Train adapters and compare with peft alone."""
    try:
        import peft
    except ImportError as error:
        msg = "peft is not installed"
        raise CannotRun(msg) from error
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(4)
    plain: Any = peft.get_peft_model(device_smoke.make_model(), config)
    start = {name: each.detach().clone() for name, each in plain.named_parameters() if each.requires_grad}
    booster = Booster(setting.device, "fp32", make_plugin(plugin, options))
    torch.manual_seed(4)
    model: Any = booster.enable_lora(device_smoke.make_model(), lora_config=config)
    for name, each in model.named_parameters():
        if each.requires_grad:
            each.data.copy_(start[name])
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
    model, optimizer, *_ = booster.boost(model, optimizer)
    plain = plain.to(setting.device)
    reference = torch.optim.AdamW([each for each in plain.parameters() if each.requires_grad], lr=1e-2, eps=1e-2)
    for step in range(3):
        batch = {name: each.to(setting.device) for name, each in device_smoke.batch_of(step).items()}
        loss, expected = model(**batch).loss, plain(**batch).loss
        assert abs(float(loss.detach()) - float(expected.detach())) <= 1e-5 * abs(float(expected.detach()))
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        expected.backward()
        reference.step()
        reference.zero_grad()
    booster.save_lora_as_pretrained(model, setting.folder / "adapters")
    loaded: Any = peft.PeftModel.from_pretrained(device_smoke.make_model(), setting.folder / "adapters")
    found = {name: each.detach() for name, each in loaded.named_parameters() if name in start}
    trained = {name: each.detach().cpu() for name, each in plain.named_parameters() if name in start}
    assert_same_tensors(found, trained, ADAPTIVE)


def _parts(function: Callable[..., None], names: Sequence[str], **more: Any) -> list[Part]:
    """Return a part for each plugin."""
    told = "".join(f", {name} {value}" for name, value in more.items() if value)
    return [Part(f"{name}{told}", function, under(name, **more)) for name in names]


WAYS = {
    "offloaded": ("ddp", "fsdp", "zero 2", "gemini", "gemini, offload"),
    "recomputed": ("fsdp", "zero 2", "gemini"),
    "recomputed, products kept": ("gemini",),
    "recomputed from the host": ("gemini",),
}
CASES = [
    *(
        case_of(f"compiled layers: {name}", _parts(train_compiled, [name], how="layers", mode=None), seconds=150)
        for name in ("ddp", "fsdp", "zero 1", "gemini", "hybrid")
    ),
    *(
        Case(
            f"compiled with CUDA graphs, {how}: {name}",
            train_compiled,
            under(name, how=how, mode="reduce-overhead"),
            seconds=150,
            only_on="cuda",
        )
        for name, how in (
            ("ddp", "whole"),
            ("fsdp", "whole"),
            ("zero 1", "whole"),
            ("gemini", "whole"),
            ("gemini, offload", "layers"),
            ("hybrid", "whole"),
        )
    ),
    *(
        Case(f"CUDA graphs are refused: {name}", capture, under(name), only_on="cuda")
        for name in ("ddp", "fsdp", "zero 2", "gemini, offload")
    ),
    Case("CUDA graphs of other models work", capture_alone, only_on="cuda"),
    case_of(
        "activations elsewhere",
        [part for how, names in WAYS.items() for part in _parts(keep_activations, names, how=how)],
    ),
    Case("activations elsewhere: less memory", save_memory_by_offload, only_on="cuda"),
    case_of("generate", _parts(generate, ("ddp", "fsdp", "zero 2", "gemini", "gemini, offload", "hybrid"))),
    case_of(
        "save_pretrained",
        [
            *_parts(save_pretrained, ("ddp", "fsdp", "zero 2", "gemini, offload", "hybrid"), is_lazy=False),
            *_parts(save_pretrained, ("fsdp", "gemini, offload"), is_lazy=True),
        ],
    ),
    case_of(
        "lazy models",
        _parts(train_lazy, ("ddp", "fsdp", "zero 1", "gemini")),
    ),
    case_of("adapters", _parts(train_adapters, ("fsdp", "zero 2", "gemini"))),
]
