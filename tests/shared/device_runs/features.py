"""What users combine with every plugin: compiled models, CUDA graphs, activations elsewhere, lazy models."""

import os
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from booster_core.errors import ConfigError
from booster_runtime import LazyInitContext, enable_activation_checkpointing
from booster_runtime.activations import enable_activation_offload
from device_runs.cases import CannotRun, Case
from device_runs.parts import case_of
from device_runs.small import Decoder, Run, adamw, assert_same_bits, repeat_bits, tokens_of, under

STEPS = 6


# ---- compiled models


def train_compiled(setting, *, strategy, how, mode):
    """Train with compiled layers, or the whole compiled, and compare with a run that is not."""
    backend = _compiler(setting)
    repeat_bits()
    expected = _compiled_run(setting, strategy).train(STEPS)
    run = _compiled_run(setting, strategy)
    for module in run.booster.unwrap(run.model).layers if how == "layers" else [run.model]:
        module.compile(backend=backend, **({} if mode is None else {"mode": mode}))
    losses = []
    for number in range(STEPS):
        if mode is not None:
            torch.compiler.cudagraph_mark_step_begin()
        losses.append(float(run.step(number)))
    # Fused kernels round less often: in bf16 a rounding of logits remains.
    assert losses == pytest.approx(expected, rel=2**-6, abs=0.0)
    assert losses[-1] < 0.98 * losses[1], losses  # of the same tokens


def _compiled_run(setting, strategy):
    torch.manual_seed(0)
    model = Decoder(256, 2, 4) if setting.is_real else Decoder(32, 2, 2)
    return Run(setting, strategy, "bf16", model=model, make_optimizer=adamw)


def _compiler(setting):
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


def capture(setting, *, strategy):
    """Forward, backward and step raise while a graph is captured, and training goes on as if nothing was."""
    repeat_bits()
    expected = Run(setting, strategy)
    losses = expected.train(4)
    run = Run(setting, strategy)
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


def _record(graph, stream, call):
    # Threads of NCCL ask for events meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        torch.ones(8, device="cuda").add_(1)
        call()


# ---- activations


def keep_activations(setting, *, strategy, how):
    """Recomputed and offloaded activations give the bits of those that stay."""
    repeat_bits()
    plain = Run(setting, strategy, "bf16")
    expected = plain.train(4)
    run = Run(setting, strategy, "bf16")
    assert WAYS[how][0](run.model, by="Layer")
    assert run.train(4) == expected
    assert_same_bits(run.parameters(), plain.parameters("plain"), how)


# ---- lazy models


def train_lazy(setting, *, strategy):
    """A lazy model gets the values of an eager one, bit for bit, also where they are drawn."""
    found = []
    for is_lazy in (False, True):
        torch.manual_seed(11)
        with LazyInitContext() if is_lazy else nullcontext():
            model = Decoder(64, 2, 4)
        run = Run(setting, strategy, model=model)
        found.append(run.parameters(f"lazy {is_lazy}"))
    assert_same_bits(found[1], found[0], "lazy values")


def _parts(function, names, **more):
    """Return a part for each plugin."""
    told = "".join(f", {name} {value}" for name, value in more.items() if value)
    return [Case(f"{name}{told}", function, under(name, **more)) for name in names]


WAYS = {
    "offloaded": (
        partial(enable_activation_offload, least_bytes=1 << 10),
        ("ddp", "fsdp", "zero 2", "gemini", "gemini, offload"),
    ),
    "recomputed": (enable_activation_checkpointing, ("fsdp", "zero 2", "gemini")),
    "recomputed, products kept": (partial(enable_activation_checkpointing, keep="expensive"), ("gemini",)),
    "recomputed from the host": (partial(enable_activation_checkpointing, offload=True), ("gemini",)),
}
"""How activations are elsewhere, and under which plugins that is tried."""
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
    case_of(
        "activations elsewhere",
        [part for how, (_, names) in WAYS.items() for part in _parts(keep_activations, names, how=how)],
    ),
    case_of(
        "lazy models",
        _parts(train_lazy, ("ddp", "fsdp", "zero 1", "gemini")),
    ),
]
