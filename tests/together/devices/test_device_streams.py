"""Streams and pools of memory: made once, and few, because devices hand out few streams and keep memory for each."""

import gc

import torch
from device_smoke import Case
from matrix import matrix
from simulated_device import NAME, on_devices, streams_made
from torch import nn

from booster_hybrid.probe.in_process import on_ranks as probed_on_ranks

CASES = {
    "zero, offload": Case("zero", {"stage": 2, "offload": "cpu", "bucket_bytes": 1 << 14}),
    "gemini": Case("gemini", {"min_chunk_bytes": 1 << 14}),
    "gemini, offload": Case(
        "gemini", {"min_chunk_bytes": 1 << 14, "offload_param_frac": 1.0, "offload_optim_frac": 1.0}
    ),
    "gemini, half": Case("gemini", {"min_chunk_bytes": 1 << 14, "offload_param_frac": 0.5, "offload_optim_frac": 0.5}),
    "fsdp, offload": Case("fsdp", {"cpu_offload": True}),
}


@matrix(["zero, offload", "gemini, half"], name=CASES)
@on_devices(2)
def test_streams_are_made_once_and_pools_stay_small(name, simulated_device):
    gc.collect()
    torch.simulated.empty_cache()
    torch.simulated.reset_peak_memory_stats()
    before = streams_made()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)), nn.Linear(64, 1))
    booster = CASES[name].make_booster(NAME)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    x = torch.ones(256, 64, device=NAME)
    streams, reserved = [], []
    for _ in range(4):
        for _ in range(2):
            booster.backward(model(x).square().mean(), optimizer)
            optimizer.clip_grad_by_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
        streams.append(streams_made() - before)
        reserved.append(torch.simulated.memory_reserved())
    allocated = torch.simulated.max_memory_allocated()
    assert streams[-1] == streams[0], f"streams after each two steps: {streams}"
    assert streams[-1] <= (8 if name == "fsdp, offload" else 4), "torch's FSDP makes some of its own"
    assert reserved[-1] == reserved[1], f"memory that pools hold after each two steps: {reserved}"
    assert reserved[-1] <= 1.25 * allocated, f"{reserved[-1]} bytes in pools, {allocated} at the peak"


@on_devices(1, timeout_seconds=60)
def test_ranks_within_a_process_meet_in_backward_on_the_callers_stream(simulated_device):
    class Summed(torch.autograd.Function):
        """A sum over the ranks of a group within one process, in forward and in backward."""

        @staticmethod
        def forward(ctx, value, rank):
            ctx.rank = rank
            total = value.clone()
            rank.all_reduce(total).wait()
            return total

        @staticmethod
        def backward(ctx, gradient):
            return Summed.forward(ctx, gradient, ctx.rank), None

    def run(rank):
        value = torch.tensor(1.0 + rank.rank, device=NAME, requires_grad=True)
        (Summed.apply(value, rank) * (rank.rank + 1)).backward()
        return value.grad.item(), torch.accelerator.current_stream() == stream

    stream = torch.Stream(NAME)
    with stream:
        assert probed_on_ranks(2, run, device=torch.device(NAME)) == [(3.0, True)] * 2
