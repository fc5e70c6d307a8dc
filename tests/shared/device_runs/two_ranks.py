"""Several ranks, on one card over the staged backend, or on a card each with NCCL."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import device_smoke
import torch
import torch.distributed as dist
from torch.nn import functional
from transformers.masking_utils import and_masks, causal_mask_function, packed_sequence_mask_function

import booster_core
from booster_hybrid.mesh import RankGroup
from booster_hybrid.sequence_parallel.exchange import SequenceLayout
from booster_hybrid.sequence_parallel.flex_kernel import takes_rules
from booster_hybrid.sequence_parallel.mask import SequenceMask, Visibility
from booster_hybrid.sequence_parallel.ring_attention import AttentionCall, ring_attention
from booster_testing.compare import DTYPES
from device_runs.cases import Case, Figure
from device_runs.runner import free_port
from device_runs.training import alone, train

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from device_runs.cases import Setting

_NUMEL = 12 << 10
_SLEEP_CYCLES = 1_000_000
"""About half a millisecond."""
_LONG_CYCLES = 800_000_000
"""About 0.4 s."""
_MOST_HOST_SECONDS = 0.15
_LENGTH = 512
_OF_BF16 = 2**-6
"""What sums of products of bf16 may differ by from those of fp32, of their norm."""
_DELAYED_CALLS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all_single",
    "broadcast",
    "irecv",
    "isend",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)


# ---- order


def host_runs_ahead(setting: Setting) -> Sequence[Figure]:
    """Wait for an all-reduce whose inputs one rank computes late: only the stream may wait, and it must."""
    module = setting.module
    tensor = torch.full((_NUMEL,), float(setting.rank + 1), device=setting.device)
    dist.all_reduce(tensor.clone())
    other = torch.zeros(_NUMEL, device=setting.device)
    other += tensor.clone().mul_(2)[0] + (tensor * 3)[0]  # a kernel that is loaded later would wait for all streams
    other += 1
    side = module.Stream()
    module.synchronize()
    dist.barrier()
    begin = time.monotonic()
    if setting.rank == 1:
        module._sleep(_LONG_CYCLES)
    tensor.mul_(2)
    work = dist.all_reduce(tensor, async_op=True)
    with module.stream(side):
        other += 1  # ordered after nothing that is late
        side.synchronize()
    is_early = not work.is_completed()
    work.wait()
    result = tensor * 3
    on_host = time.monotonic() - begin
    expected = 6.0 * sum(range(1, setting.world_size + 1))
    assert torch.equal(result.cpu(), torch.full((_NUMEL,), expected)), (
        "a stream did not wait for what it was to wait for"
    )
    in_all = time.monotonic() - begin
    assert in_all > _MOST_HOST_SECONDS, f"the sleep took {in_all:.3f} s only"
    assert on_host < _MOST_HOST_SECONDS, (
        f"the host waited {on_host:.3f} s for an all-reduce that was {in_all:.3f} s late"
    )
    assert is_early, "an all-reduce had ended before its inputs were there"
    return [Figure("host's time of an all-reduce whose inputs are 0.4 s late", [on_host], bar=_MOST_HOST_SECONDS)]


def train_late(setting: Setting, *, case: device_smoke.Case, precision: str) -> None:
    """Train as `training.train`, while rank 1 comes late to each message and to each work on the engine's streams."""
    with delays(setting) if setting.rank == 1 else contextlib.nullcontext():
        train(setting, case=case, precision=precision)


@contextlib.contextmanager
def delays(setting: Setting) -> Iterator[None]:
    """Let the current stream sleep before each message, and the engine's streams before what is started in them."""
    from booster_runtime.memory.host_memory import CopyStream

    original, calls = CopyStream.own_order, {}
    own_order = original

    @contextlib.contextmanager
    def late(stream: CopyStream) -> Iterator[None]:
        with own_order(stream):
            _sleep(setting)
            yield

    def delayed(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def sleep_and_call(*args: Any, **kwargs: Any) -> Any:
            _sleep(setting)
            return call(*args, **kwargs)

        return sleep_and_call

    for name in _DELAYED_CALLS:
        call = getattr(dist, name, None)
        if call is not None:
            calls[name] = call
            setattr(dist, name, delayed(call))
    CopyStream.own_order = late  # type: ignore[method-assign]
    try:
        yield
    finally:
        CopyStream.own_order = original  # type: ignore[method-assign]
        for name, call in calls.items():
            setattr(dist, name, call)


def _sleep(setting: Setting) -> None:
    if setting.is_real:
        setting.module._sleep(_SLEEP_CYCLES)
    else:
        time.sleep(1e-4)


# ---- saved on two ranks, loaded on one


def save_here_load_alone(setting: Setting, *, case: device_smoke.Case, precision: str, as_dcp: bool) -> None:
    """Save a run, and let rank 0 alone go on with it in a new world, with NCCL where there is CUDA."""
    run = device_smoke.Run(case, setting.device, precision)
    for step in range(2):
        run.step(step)
    folder = setting.folder
    how = {"gather_dtensor": False} if as_dcp else {"shard": True}
    run.booster.save_model(run.model, str(folder / "model"), **how)
    run.booster.save_optimizer(run.optimizer, str(folder / "optimizer"), **how)
    run.model.save_pretrained(folder / "pretrained")
    expected = run.step(2)
    booster_core.shutdown()
    if setting.rank > 0:
        return
    backend = "cpu:gloo,cuda:nccl" if setting.is_real else "cpu:gloo,simulated:simccl"
    booster_core.launch(0, 1, "localhost", free_port(), backend=backend, local_rank=0, verbose=False)
    tolerance = 8 * torch.finfo(DTYPES[precision]).eps
    other = device_smoke.Run(alone(case), setting.device, precision)
    other.booster.load_model(other.model, str(folder / "model"))
    other.booster.load_optimizer(other.optimizer, str(folder / "optimizer"))
    found = other.step(2)
    assert abs(found - expected) <= tolerance * abs(expected), (found, expected)
    _compare_pretrained(setting, folder / "pretrained", expected, tolerance)


def _compare_pretrained(setting: Setting, folder: Path, expected: float, tolerance: float) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder).to(setting.device)
    batch = {name: tensor.to(setting.device) for name, tensor in device_smoke.batch_of(2).items()}
    with torch.no_grad():
        loss = float(model(**batch).loss)
    assert abs(loss - expected) <= tolerance * abs(expected), (loss, expected)


# ---- packed documents over split sequences


def attend_to_documents(setting: Setting, *, num_heads: int) -> None:
    """Attention of packed documents, in a ring and at once, has the outputs and gradients of a mask of the whole."""
    generator = torch.Generator().manual_seed(1)
    documents = (torch.rand(2, _LENGTH, generator=generator) > 0.98).cumsum(1).to(setting.device)
    rule = and_masks(causal_mask_function, packed_sequence_mask_function(documents))
    sees = (documents.unsqueeze(-1) == documents.unsqueeze(-2)).tril().unsqueeze(1)
    shapes = [(2, heads, _LENGTH, 64) for heads in (4, num_heads, num_heads, 4)]
    drawn = [torch.randn(shape, generator=generator).to(setting.device) for shape in shapes]
    whole, weights = [each.requires_grad_() for each in drawn[:3]], drawn[3]
    expected = functional.scaled_dot_product_attention(*whole, attn_mask=sees, enable_gqa=True)
    (expected * weights).sum().backward()
    for num_ranks in (1, setting.world_size):
        rank = setting.rank if num_ranks > 1 else 0
        layout = SequenceLayout(_LENGTH, num_ranks, zigzag=True)
        local = [layout.take(each.detach().bfloat16(), 2, rank).clone().requires_grad_() for each in whole]
        assert takes_rules(local[0], local[2]) == setting.is_real
        mask = SequenceMask(2, _LENGTH, _LENGTH, rule, None, {"device": documents.device})
        call = AttentionCall(Visibility(mask, is_causal=True), layout, RankGroup(None, rank, num_ranks))
        found = ring_attention(*local, call)
        (found.float() * layout.take(weights, 2, rank)).sum().backward()
        for ours, theirs in zip([found, *local], [expected, *whole], strict=True):
            (mine, whole_of_it) = (ours, theirs) if ours is found else (ours.grad, theirs.grad)
            assert mine is not None
            assert whole_of_it is not None
            own = layout.take(whole_of_it.detach(), 2, rank)
            assert float((mine.detach().float() - own).norm() / own.norm()) < _OF_BF16


# ---- a rank that fails

_FAILING = """
import os, sys, time
how, rank, port, backend, device, library = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
import torch
if library:
    import simulated_device
    simulated_device.load(library)
if "staged" in backend:
    from device_runs import staged
    staged.register(device)
import booster_core, device_smoke
from booster_core.ranks import DistCoordinator
booster_core.launch(rank, 2, "localhost", port, backend=backend, local_rank=rank, verbose=False, timeout_seconds=60)
run = device_smoke.Run(device_smoke.CASES["zero 2"], device, "fp32")
run.step(0)
torch.get_device_module(device).synchronize()
DistCoordinator().block_all(name="failing")
print("FAILS", time.time(), flush=True)
if rank == 1:
    if how == "exits":
        os._exit(3)
    raise ValueError("rank 1 fails on purpose")
run.step(1)
print("went on", flush=True)
"""


def fail(setting: Setting, *, how: str) -> Sequence[Figure]:
    """Let one of two ranks fail between two steps: the other must end soon, and say which rank failed, and how."""
    command = [sys.executable, "-c", _FAILING, how]
    if setting.rank == 0:
        (setting.folder / "port").write_text(str(free_port()), encoding="utf-8")
    dist.barrier()
    port = (setting.folder / "port").read_text(encoding="utf-8")
    command += [str(setting.rank), port, setting.backend, setting.device, setting.library]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=70, check=False)
    except subprocess.TimeoutExpired as late:
        msg = f"rank {setting.rank} did not end: {late.stdout!r} {late.stderr!r}"
        raise AssertionError(msg) from late
    end = time.time()
    printed = f"{done.stdout}\n{done.stderr}"
    assert "FAILS" in done.stdout, printed[-3000:]
    assert done.returncode, f"rank {setting.rank} ended with 0:\n{printed[-3000:]}"
    if setting.rank != 0:
        return []
    seconds = end - float(done.stdout.split("FAILS")[1].split()[0])
    assert "went on" not in done.stdout, printed[-3000:]
    assert "rank 1" in printed.lower(), f"rank 0 did not say that rank 1 had failed:\n{printed[-3000:]}"
    said = next(line for line in printed.splitlines() if "rank 1" in line.lower())
    return [Figure(f"until rank 0 ends when rank 1 {how}; it says: {said[:160]}", [seconds], bar=15.0)]


LATE = ("zero 2", "gemini", "pipeline", "gemini, offload")
LOADED = (
    ("fsdp", "fp32", False),
    ("fsdp", "bf16", True),
    ("zero 2", "bf16", False),
    ("gemini", "fp32", True),
    ("pipeline", "fp32", True),
)

CASES = [
    Case("the host runs ahead of an all-reduce, 2 ranks", host_runs_ahead, ranks=2, only_on="cuda", is_timed=True),
    *(
        Case(
            f"{name}, rank 1 comes late, 2 ranks",
            train_late,
            {"case": device_smoke.CASES[name], "precision": "fp32"},
            ranks=2,
            seconds=120,
        )
        for name in LATE
    ),
    *(
        Case(
            f"{name} of two ranks loaded by one, {'DCP' if as_dcp else 'safetensors'}",
            save_here_load_alone,
            {"case": device_smoke.CASES[name], "precision": precision, "as_dcp": as_dcp},
            ranks=2,
        )
        for name, precision, as_dcp in LOADED
    ),
    *(
        Case(f"packed documents, {num_heads} heads of keys, 2 ranks", attend_to_documents, {"num_heads": num_heads}, 2)
        for num_heads in (4, 1)
    ),
    *(Case(f"one of two ranks {how}", fail, {"how": how}, ranks=2, seconds=90) for how in ("raises", "exits")),
]
