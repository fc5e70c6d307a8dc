"""State on the host or on a disk: each step has the bits of the same plugin without offload."""

import gc
from contextlib import nullcontext

import device_smoke
import torch

from device_runs.cases import Case
from device_runs.parts import case_of
from device_runs.small import (
    STRATEGIES,
    Decoder,
    Run,
    assert_same_bits,
    late_compute,
    late_copies,
    repeat_bits,
    tokens_of,
    under,
)

GEMINI = {
    "both": {"offload_param_frac": 1.0, "offload_optim_frac": 1.0},
    "half": {"offload_param_frac": 0.5, "offload_optim_frac": 0.5},
    "parameters": {"offload_param_frac": 1.0},
    "optimizer state": {"offload_optim_frac": 1.0},
}
STEPS = 5


def _base(setting, strategy):
    """Return options of a plugin with and without offload: on the simulated device several chunks."""
    return {"min_chunk_bytes": 1 << 16} if strategy.plugin == "gemini" and not setting.is_real else {}


def equal(setting, *, strategy, offload, precision, in_folder):
    """Train with and without offload, with copies and kernels that are late, and compare losses and parameters."""
    repeat_bits()
    base = _base(setting, strategy)
    offload = {**base, **offload, **({"offload_dir": setting.folder} if in_folder else {})}
    stays = Run(setting, strategy, precision, **base)
    expected, parameters = stays.train(STEPS), stays.parameters()
    for name, lateness in (("copies", late_copies), ("compute", late_compute)):
        moves = Run(setting, strategy, precision, **offload)
        with lateness(setting, moves.model):
            losses = moves.train(STEPS)
        assert losses == expected, f"late {name}: {losses} != {expected}"
        assert_same_bits(moves.parameters(), parameters, f"late {name}")
        del moves


def stay_within_a_fraction(setting):
    """A budget trains where the process may use less of the device than parameters, gradients and state take."""
    repeat_bits()

    def model():
        torch.manual_seed(0)
        return Decoder(1024, 8, 8)

    stays = Run(setting, STRATEGIES["gemini"], model=model())
    numel = sum(parameter.numel() for parameter in model().parameters())
    expected, parameters = stays.train(STEPS), stays.parameters()
    del stays
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    total = torch.cuda.get_device_properties(0).total_memory
    # Parameters, gradients and momentum take 12 bytes each; activations, workspaces and fragments 256 MiB.
    limit = 8 * numel + (256 << 20)
    torch.cuda.set_per_process_memory_fraction(limit / total)
    within = {"placement_policy": "auto", "memory_budget_bytes": 6 * numel}
    moves = Run(setting, STRATEGIES["gemini"], model=model(), **within)
    with late_copies(setting):
        losses = moves.train(STEPS)
    assert losses == expected, (losses, expected)
    assert_same_bits(moves.parameters(), parameters, "auto")
    places = moves.model.gatherer.memory.bytes_by_place()
    assert min(places["cpu"], places["cuda"]) > 0, f"not everything fits, and something does: {places}"


def accumulate(setting, *, strategy, offload):
    """Gradients of three batches add up on the host as they do on the device."""
    repeat_bits()
    found = []
    for more in ({}, offload):
        run = Run(setting, strategy, **_base(setting, strategy), **more)
        with late_copies(setting):
            for step in range(3):
                for batch in range(3):
                    loss = run.model(tokens_of(10 * step + batch, setting.device)) / 4
                    with run.booster.no_sync(run.model, run.optimizer) if batch < 2 else nullcontext():
                        run.booster.backward(loss, run.optimizer)
                run.optimizer.step()
                run.optimizer.zero_grad()
        found.append(run.parameters())
    assert_same_bits(found[1], found[0], "three batches a step")


TO_HOST = {"offload": "cpu"}
KINDS = {
    "zero": [
        ("stage 1", STRATEGIES["zero 1"], TO_HOST),
        ("stage 2", STRATEGIES["zero 2"], TO_HOST),
        ("small buckets", device_smoke.Case("zero", {"stage": 1, "bucket_bytes": 1 << 16}), TO_HOST),
    ],
    "fsdp": [("on the host", STRATEGIES["fsdp"], {"cpu_offload": True})],
    "gemini": [
        *((name, STRATEGIES["gemini"], options) for name, options in GEMINI.items()),
        ("on disk", STRATEGIES["gemini"], GEMINI["both"]),
    ],
}
CASES = [
    *(
        case_of(
            f"offload equals none: {plugin}, {precision}",
            [
                Case(
                    name,
                    equal,
                    {"strategy": strategy, "offload": o, "precision": precision, "in_folder": name == "on disk"},
                )
                for name, strategy, o in kinds[: None if precision == "bf16" else 1]
            ],
            seconds=150,  # a slow disk takes most of it
        )
        for plugin, kinds in KINDS.items()
        for precision in ("bf16", "fp32")
    ),
    case_of(
        "offload: gradients of three batches",
        [
            Case("zero", accumulate, under("zero 1", offload=TO_HOST)),
            Case("gemini", accumulate, under("gemini", offload=GEMINI["both"])),
        ],
    ),
    Case("offload: auto within a part of the device", stay_within_a_fraction, only_on="cuda"),
]
