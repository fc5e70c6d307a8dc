"""Several ranks, on one card over the staged backend, or on a card each with NCCL."""

import contextlib
import functools
import os
import subprocess
import sys
import time
from unittest import mock

import device_smoke
import torch
import torch.distributed as dist
from free_ports import free_port
from torch.nn import functional
from transformers.masking_utils import and_masks, causal_mask_function, packed_sequence_mask_function

from booster_hybrid.mesh import RankGroup
from booster_hybrid.sequence_parallel.exchange import SequenceLayout
from booster_hybrid.sequence_parallel.flex_kernel import takes_rules
from booster_hybrid.sequence_parallel.mask import SequenceMask, Visibility
from booster_hybrid.sequence_parallel.ring_attention import AttentionCall, ring_attention
from device_runs.cases import Case, Figure
from device_runs.small import late_copies
from device_runs.training import train

_SLEEP_CYCLES = 1_000_000
"""About half a millisecond."""
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


def train_late(setting, *, case, precision):
    """Train as `training.train`, while rank 1 comes late to each message and to each work on the engine's streams."""
    with delays(setting) if setting.rank == 1 else contextlib.nullcontext():
        train(setting, case=case, precision=precision)


@contextlib.contextmanager
def delays(setting):
    """Let the current stream sleep before each message, and the engine's streams before what is started in them."""

    def delayed(call):
        @functools.wraps(call)
        def sleep_and_call(*args, **kwargs):
            _sleep(setting)
            return call(*args, **kwargs)

        return sleep_and_call

    calls = {name: delayed(getattr(dist, name)) for name in _DELAYED_CALLS if hasattr(dist, name)}
    with late_copies(setting), mock.patch.multiple(dist, **calls):
        yield


def _sleep(setting):
    if setting.is_real:
        setting.module._sleep(_SLEEP_CYCLES)
    else:
        time.sleep(1e-4)


# ---- packed documents over split sequences


def attend_to_documents(setting, *, num_heads):
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


def fail(setting, *, how):
    """Let one of two ranks fail between two steps: the other must end soon, and say which rank failed, and how."""
    command = [sys.executable, "-c", _FAILING, how]
    if setting.rank == 0:
        (setting.folder / "port").write_text(str(free_port()), encoding="utf-8")
    dist.barrier()
    port = (setting.folder / "port").read_text(encoding="utf-8")
    command += [str(setting.rank), port, setting.backend, setting.device, setting.library]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # pytest adds paths to this process alone
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=70, check=False)
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
CASES = [
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
        Case(f"packed documents, {num_heads} heads of keys, 2 ranks", attend_to_documents, {"num_heads": num_heads}, 2)
        for num_heads in (4, 1)
    ),
    *(Case(f"one of two ranks {how}", fail, {"how": how}, ranks=2, seconds=90) for how in ("raises", "exits")),
]
