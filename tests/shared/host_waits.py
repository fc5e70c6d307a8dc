"""What the host waits for in a step: what it reads of a device, and streams and events that it waits for itself."""

import contextlib
import sys
import traceback

import torch
import torch.distributed as dist
from device_smoke import Case
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

CASES = {
    "fsdp": Case("fsdp"),
    "zero 1": Case("zero", {"stage": 1}),
    "zero 2, overlapped": Case("zero", {"stage": 2, "bucket_bytes": 1 << 14, "overlap_allgather": True}),
    "gemini": Case("gemini", {"min_chunk_bytes": 1 << 15}),
    "hybrid, zero 1": Case("hybrid", {"zero_stage": 1}),
}
"""Plugins whose steps wait for nothing; the simulated accelerator has no DDP without a wait of torch's own."""
STEPS_BEFORE = 4
"""The first steps lay out buckets, and compare what ranks do."""
aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten.nonzero.default}


class HostWaits(TorchDispatchMode):
    """Counts what the host reads of a device, and where it waits by other means.

    Args:
        device: Device type.

    Attributes:
        found: What was called, and from where.
    """

    def __init__(self, device):
        super().__init__()
        self._device = device
        self.found = []

    def __enter__(self):
        sys.setprofile(self._on_call)  # methods of events and streams can't be replaced
        super().__enter__()
        return self

    def __exit__(self, *error):
        sys.setprofile(None)
        super().__exit__(*error)

    def _on_call(self, frame, event, function):
        if event == "c_call" and function.__name__ in ("synchronize", "_accelerator_synchronizeDevice"):
            self.found.append(f"{function.__name__}: {_frames(traceback.extract_stack(frame))}")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in READS and args[0].device.type == self._device:
            self.found.append(f"{func}: {_frames(traceback.extract_stack()[:-1])}")
        elif func in (aten._to_copy.default, aten.copy_.default):
            source, target = (args[0], result) if func is aten._to_copy.default else (args[1], args[0])
            is_waited_for = not (kwargs.get("non_blocking") or args[2:] == (True,))
            if source.device.type == self._device and target.device.type == "cpu" and is_waited_for:
                self.found.append(f"{func}: {_frames(traceback.extract_stack()[:-1])}")
        return result


def _frames(stack):
    return " < ".join(f"{frame.filename}:{frame.lineno}" for frame in stack[:-6:-1])


@contextlib.contextmanager
def cuda_waits_raise():
    """Let torch raise where the host waits for a CUDA device, as far as torch can tell."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


OFFLOADED = {
    f"gemini, {name}": Case("gemini", {"min_chunk_bytes": 1 << 12, **options})
    for name, options in {
        "parameters": {"offload_param_frac": 1.0},
        "state": {"offload_optim_frac": 1.0},
        "half of the state": {"offload_optim_frac": 0.5},
        "all": {"offload_param_frac": 1.0, "offload_optim_frac": 1.0},
        "auto": {"placement_policy": "auto", "memory_budget_bytes": 40_000},
    }.items()
}
"""Plugins whose state is on the host, and whose forward and backward wait for no copy."""


def waits_in_passes(case, device, precision="bf16"):
    """Return what the host waits for in forward and backward of the fifth and sixth step, of two batches each.

    Collective: every rank.
    """
    torch.manual_seed(0)
    booster = case.make_booster(device, precision)
    net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
    model, optimizer, *_ = booster.boost(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    x = torch.ones(4, 32, device=device)
    waits = HostWaits(device)
    for step in range(STEPS_BEFORE + 2):
        for _ in range(2):
            with waits if step >= STEPS_BEFORE else contextlib.nullcontext():
                booster.backward(model(x).float().square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return waits.found


def waits_of(case, device, precision="fp32"):
    """Return what the host waits for in the fifth and sixth step, and how many of three waits are found.

    On CUDA the seventh and eighth run where torch raises, unless the others have waited.

    Collective: every rank.
    """
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.LayerNorm(32)) for _ in range(4)]
    model = nn.Sequential(*layers, nn.BatchNorm1d(32), nn.Linear(32, 1))
    booster = case.make_booster(device, precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device == "cuda")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
    x = torch.full((4, 32), dist.get_rank() + 1.0, device=device)

    def step():
        loss = model(x).float().square().mean()
        booster.backward(loss, optimizer)
        norm = optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return loss.detach(), norm

    for _ in range(STEPS_BEFORE):
        step()
    with HostWaits(device) as waits:
        step()
        loss, norm = step()
    with HostWaits(device) as seen:
        assert loss.item() > 0
        assert norm.cpu().isfinite()
        torch.accelerator.synchronize()
    if device == "cuda" and not waits.found:
        with cuda_waits_raise():
            step()
            step()
    return waits.found, len(seen.found)
