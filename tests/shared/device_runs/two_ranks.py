"""Several ranks, on one card over the staged backend, or on a card each with NCCL."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import time
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import device_smoke
import torch
import torch.distributed as dist

import booster_core
from booster_testing.compare import DTYPES
from device_runs.cases import Case, Figure
from device_runs.language_models import boosted_step, make_batch, make_llama, make_optimizer, make_plugin, size_of
from device_runs.measuring import forget
from device_runs.runner import free_port
from device_runs.training import alone, train

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from device_runs.cases import Setting

_NUMEL = 12 << 10
_SLEEP_CYCLES = 1_000_000
"""About half a millisecond."""
_LONG_CYCLES = 800_000_000
"""About 0.4 s."""
_MOST_HOST_SECONDS = 0.15
_REDUCED = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8)
_MOVED = (*_REDUCED, torch.bool, torch.int8)
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


# ---- collectives


def collectives(setting: Setting) -> None:
    """Compare collectives on the device with tensors that gloo gathers on the CPU, dtype by dtype."""
    for dtype in _MOVED:
        mine = _values(setting, dtype)
        everyones = _gathered(mine)
        _compare(f"all_to_all, {dtype}", _all_to_all(setting, mine), _rows_for(setting, everyones))
        for name, move in _moves(setting, everyones).items():
            got, expected = move(mine.to(setting.device))
            _compare(f"{name}, {dtype}", got, expected)
    for dtype in _REDUCED:
        mine = _values(setting, dtype)
        everyones = _gathered(mine)
        for op in ("SUM", "AVG", "MIN", "MAX", "PRODUCT"):
            _compare_reductions(setting, op, mine, everyones)
    _compare_reductions(setting, "SUM", _values(setting, torch.bool), _gathered(_values(setting, torch.bool)))
    messages(setting)
    dist.barrier(device_ids=[setting.module.current_device()] if setting.is_real else None)


def messages(setting: Setting) -> None:
    """Send around a ring, one by one and in a batch of several each way."""
    rank, size = setting.rank, setting.world_size
    after, before = (rank + 1) % size, (rank - 1) % size
    for dtype in _MOVED:
        sent = [(_values(setting, dtype) * (1 if dtype == torch.bool else place + 1)) for place in range(2)]
        rooms = [torch.empty_like(each, device=setting.device) for each in sent]
        own = [each.to(setting.device) for each in sent]
        expected = [_gathered(each)[before] for each in sent]
        if rank % 2:
            dist.recv(rooms[0], before)
            dist.send(own[0], after)
        else:
            dist.send(own[0], after)
            dist.recv(rooms[0], before)
        _compare(f"a message, {dtype}", rooms[0], expected[0])
        listed = [dist.P2POp(dist.irecv, room.zero_(), before) for room in rooms]
        listed += [dist.P2POp(dist.isend, each, after) for each in own]
        for work in dist.batch_isend_irecv(listed):
            work.wait()
        for room, each in zip(rooms, expected, strict=True):
            _compare(f"a batch of messages, {dtype}", room, each)


def _moves(setting: Setting, everyones: list[Tensor]) -> dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    rank, size, root = setting.rank, setting.world_size, setting.world_size - 1

    def broadcast(mine: Tensor) -> tuple[Tensor, Tensor]:
        dist.broadcast(mine, root, async_op=True).wait()
        return mine, everyones[root]

    def all_gather(mine: Tensor) -> tuple[Tensor, Tensor]:
        whole = mine.new_empty(size * mine.numel())
        _call("all_gather_single", "all_gather_into_tensor")(whole, mine, async_op=True).wait()
        return whole, torch.cat(everyones)

    def all_gather_in_place(mine: Tensor) -> tuple[Tensor, Tensor]:
        whole = mine.new_empty(size * mine.numel())
        own = whole[rank * mine.numel() : (rank + 1) * mine.numel()]
        own.copy_(mine)
        _call("all_gather_single", "all_gather_into_tensor")(whole, own)
        return whole, torch.cat(everyones)

    def uneven_all_gather(mine: Tensor) -> tuple[Tensor, Tensor]:
        parts = [mine.new_empty(_NUMEL - each) for each in range(size)]
        dist.all_gather(parts, mine[: _NUMEL - rank].contiguous(), async_op=True).wait()
        return torch.cat(parts), torch.cat([part[: _NUMEL - each] for each, part in enumerate(everyones)])

    def gather(mine: Tensor) -> tuple[Tensor, Tensor]:
        parts = [torch.empty_like(mine) for _ in range(size)] if rank == root else None
        dist.gather(mine, parts, root)
        return (mine, mine.cpu()) if parts is None else (torch.cat(parts), torch.cat(everyones))

    def scatter(mine: Tensor) -> tuple[Tensor, Tensor]:
        parts = [mine + place if mine.dtype != torch.bool else mine for place in range(size)]
        room = torch.empty_like(mine)
        dist.scatter(room, parts if rank == root else None, root)
        sent = everyones[root]
        return room, sent if sent.dtype == torch.bool else sent + rank

    def uneven_all_to_all(mine: Tensor) -> tuple[Tensor, Tensor]:
        """Rank r sends r + 1 rows more to the next rank than to the others."""
        splits = [
            [2 + (sender + 1) * (receiver == (sender + 1) % size) for receiver in range(size)] for sender in range(size)
        ]
        rows = [part.view(-1, 4) for part in everyones]
        taken = [rows[sender][sum(splits[sender][:rank]) :][: splits[sender][rank]] for sender in range(size)]
        lengths = [len(each) for each in taken]
        room = mine.new_empty(sum(lengths), 4)
        own = mine.view(-1, 4)[: sum(splits[rank])].contiguous()
        dist.all_to_all_single(room, own, lengths, splits[rank], async_op=True).wait()
        return room, torch.cat(taken)

    return {
        "broadcast": broadcast,
        "all_gather": all_gather,
        "all_gather in place": all_gather_in_place,
        "uneven all_gather": uneven_all_gather,
        "gather": gather,
        "scatter": scatter,
        "uneven all_to_all": uneven_all_to_all,
    }


def _compare_reductions(setting: Setting, op: str, mine: Tensor, everyones: list[Tensor]) -> None:
    size, rank, how = setting.world_size, setting.rank, getattr(dist.ReduceOp, op)
    if op == "AVG" and not mine.is_floating_point():
        mine, everyones = mine * size, [each * size for each in everyones]
    expected = _reduced(op, everyones)
    own = mine.to(setting.device)
    tensor = own.clone()
    dist.all_reduce(tensor, how, async_op=True).wait()
    _compare(f"all_reduce {op}, {mine.dtype}", tensor, expected)
    tensor = own.clone()
    dist.reduce(tensor, 0, how)
    if rank == 0:
        _compare(f"reduce {op}, {mine.dtype}", tensor, expected)
    part = _NUMEL // size
    room = own.new_empty(part)
    _call("reduce_scatter_single", "reduce_scatter_tensor")(room, own, how, async_op=True).wait()
    _compare(f"reduce_scatter {op}, {mine.dtype}", room, expected[rank * part :][:part])
    bounds = [0, *(_NUMEL // size * (place + 1) + 1 for place in range(size - 1)), _NUMEL]
    slices = [own[start:stop] for start, stop in pairwise(bounds)]
    room = torch.empty_like(slices[rank])
    dist.reduce_scatter(room, slices, how, async_op=True).wait()
    _compare(f"uneven reduce_scatter {op}, {mine.dtype}", room, expected[bounds[rank] : bounds[rank + 1]])


def _reduced(op: str, everyones: list[Tensor]) -> Tensor:
    """Reduce small whole numbers, which no dtype rounds."""
    if everyones[0].dtype == torch.bool:
        return torch.stack(everyones).any(0)
    stacked = torch.stack([each.double() for each in everyones])
    results = {
        "SUM": stacked.sum(0),
        "AVG": stacked.mean(0),
        "MIN": stacked.amin(0),
        "MAX": stacked.amax(0),
        "PRODUCT": stacked.prod(0),
    }
    return results[op].to(everyones[0].dtype)


def _all_to_all(setting: Setting, mine: Tensor) -> Tensor:
    own = mine.to(setting.device)
    room = torch.empty_like(own)
    dist.all_to_all_single(room, own, async_op=True).wait()
    parts = list(torch.empty_like(own).chunk(setting.world_size))
    dist.all_to_all(parts, list(own.chunk(setting.world_size)), async_op=True).wait()
    _compare(f"all_to_all of lists, {mine.dtype}", torch.cat(parts), room.cpu())
    return room


def _rows_for(setting: Setting, everyones: list[Tensor]) -> Tensor:
    return torch.cat([each.chunk(setting.world_size)[setting.rank] for each in everyones])


def _values(setting: Setting, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(setting.rank)
    high = 2 if dtype == torch.bool else 4
    return torch.randint(high - 2 if high == 2 else 1, high, (_NUMEL,), generator=generator).to(dtype)


def _gathered(mine: Tensor) -> list[Tensor]:
    """Return every rank's tensor, sent over the CPU."""
    parts = [torch.empty_like(mine).view(torch.uint8) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine.view(torch.uint8))
    return [part.view(mine.dtype) for part in parts]


def _compare(what: str, got: Tensor, expected: Tensor) -> None:
    found = got.cpu()
    assert found.dtype == expected.dtype, (what, found.dtype, expected.dtype)
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    different = (found != expected).nonzero().flatten()
    if different.numel():
        first = int(different[0])
        msg = f"{what}: {different.numel()} of {found.numel()} differ; {first} is {found[first]}, not {expected[first]}"
        raise AssertionError(msg)


def _call(name: str, former: str) -> Callable[..., Any]:
    return getattr(dist, name, None) or getattr(dist, former)


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
    from booster_runtime.memory.copy_stream import CopyStream

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


# ---- memory


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
LATE = ("zero 2", "gemini", "pipeline", "gemini, offload")
LOADED = (
    ("fsdp", "fp32", False),
    ("fsdp", "bf16", True),
    ("zero 2", "bf16", False),
    ("gemini", "fp32", True),
    ("pipeline", "fp32", True),
)

CASES = [
    *(Case(f"collectives by dtype, {ranks} ranks", collectives, ranks=ranks, seconds=60) for ranks in (2, 4)),
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
    *(Case(f"one of two ranks {how}", fail, {"how": how}, ranks=2, seconds=90) for how in ("raises", "exits")),
]
MEMORY = [
    *(
        Case(f"memory of a Llama of 300M, {engine}, 2 ranks", memory, {"engine": engine}, ranks=2, is_timed=True)
        for engine in ENGINES
    ),
    Case("memory of sequences split between blocks, 2 ranks", split_between_blocks, ranks=2, is_timed=True),
]
