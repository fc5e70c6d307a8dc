"""State on the host or on a disk: each step has the bits of the same plugin without offload."""

import gc

import torch

from device_runs.cases import Case
from device_runs.parts import Part, case_of
from device_runs.small import (
    Decoder,
    Run,
    assert_same_bits,
    exact_sgd,
    late_compute,
    late_copies,
    repeat_bits,
    tokens_of,
)

SMALL = {"min_chunk_bytes": 1 << 16}
GEMINI = {
    "both": {"offload_param_frac": 1.0, "offload_optim_frac": 1.0},
    "half": {"offload_param_frac": 0.5, "offload_optim_frac": 0.5},
    "parameters": {"offload_param_frac": 1.0},
    "optimizer state": {"offload_optim_frac": 1.0},
}
STEPS = 5


def equal(setting, *, plugin, options, offload, precision, in_folder=False):
    """Train with and without offload, with copies and kernels that are late, and compare losses and parameters."""
    repeat_bits()
    base = dict(options)
    if plugin == "gemini" and not setting.is_real:
        base = {**SMALL, **base}
    if in_folder:
        offload = {**offload, "offload_dir": setting.folder}
    stays = Run(setting, plugin, base, precision, make_optimizer=exact_sgd)
    expected, parameters = stays.train(STEPS), stays.parameters()
    for name, lateness in (("copies", late_copies), ("compute", late_compute)):
        moves = Run(setting, plugin, {**base, **offload}, precision, make_optimizer=exact_sgd)
        with late_copies(setting) if lateness is late_copies else late_compute(setting, moves.model):
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

    stays = Run(setting, "gemini", make_optimizer=exact_sgd, model=model())
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
    moves = Run(setting, "gemini", within, make_optimizer=exact_sgd, model=model())
    with late_copies(setting):
        losses = moves.train(STEPS)
    assert losses == expected, (losses, expected)
    assert_same_bits(moves.parameters(), parameters, "auto")
    places = moves.model.gatherer.memory.bytes_by_place()
    assert min(places["cpu"], places["cuda"]) > 0, f"not everything fits, and something does: {places}"


def accumulate(setting, *, plugin, options, offload):
    """Gradients of three batches add up on the host as they do on the device."""
    repeat_bits()
    base = {**SMALL, **options} if plugin == "gemini" and not setting.is_real else options
    found = []
    for more in ({}, offload):
        run = Run(setting, plugin, {**base, **more}, make_optimizer=exact_sgd)
        with late_copies(setting):
            for step in range(3):
                for batch in range(3):
                    loss = run.model(tokens_of(10 * step + batch, setting.device)) / 4
                    if batch < 2:
                        with run.booster.no_sync(run.model, run.optimizer):
                            run.booster.backward(loss, run.optimizer)
                    else:
                        run.booster.backward(loss, run.optimizer)
                run.optimizer.step()
                run.optimizer.zero_grad()
        found.append(run.parameters())
    assert_same_bits(found[1], found[0], "three batches a step")


KINDS = {
    "zero": [
        ("stage 1", {"stage": 1}, {"offload": "cpu"}, False),
        ("stage 2", {"stage": 2}, {"offload": "cpu"}, False),
        ("small buckets", {"stage": 1, "bucket_bytes": 1 << 16}, {"offload": "cpu"}, False),
    ],
    "fsdp": [("on the host", {}, {"cpu_offload": True}, False)],
    "gemini": [
        *((name, {}, options, False) for name, options in GEMINI.items()),
        ("on disk", {}, GEMINI["both"], True),
    ],
}
MOST = {"zero": {"offload": "cpu"}, "gemini": GEMINI["both"]}
CASES = [
    *(
        case_of(
            f"offload equals none: {plugin}, {precision}",
            [
                Part(
                    name,
                    equal,
                    {"plugin": plugin, "options": options, "offload": offload, "in_folder": d, "precision": precision},
                )
                for name, options, offload, d in kinds[: None if precision == "bf16" else 1]
            ],
            seconds=150,  # a slow disk takes most of it
        )
        for plugin, kinds in KINDS.items()
        for precision in ("bf16", "fp32")
    ),
    case_of(
        "offload: gradients of three batches",
        [Part(plugin, accumulate, {"plugin": plugin, "options": {}, "offload": o}) for plugin, o in MOST.items()],
    ),
    Case("offload: auto within a part of the device", stay_within_a_fraction, only_on="cuda"),
]
