"""The host waits for nothing in a step without offload; with it, for copies alone, which are listed."""

import device_smoke
import host_waits

from device_runs.cases import Case, Figure
from device_runs.parts import case_of

OFFLOAD = {
    **{name: device_smoke.CASES[name] for name in ("fsdp, offload", "zero 2, offload")},
    "gemini, offload": host_waits.OFFLOADED["gemini, all"],
}
WITHOUT_OFFLOAD = {
    "ddp": device_smoke.CASES["ddp"],
    **host_waits.CASES,
    "zero 2": device_smoke.CASES["zero 2"],
}


def wait(setting, *, case, precision):
    """From the fifth step on the host waits for nothing, but under a loss scale asks once whether to skip the step."""
    found, seen = host_waits.waits_of(case, setting.device, precision)
    assert seen == 3, "what is looked for is found"
    assert len(found) == (2 if precision == "fp16" else 0), "\n".join(found)  # in two steps
    assert all("loss_scaler.py" in each for each in found), "\n".join(found)


def wait_for_nothing_in_passes(setting, *, case):
    """Forward and backward wait for no copy, also where gradients of two batches add up on the host."""
    found = host_waits.waits_in_passes(case, setting.device)
    assert not found, "\n".join(found)


def list_waits(setting, *, name, case):
    """Count what a step with offload waits for: events and streams of copies, and the norm that clips on the host."""
    found, _ = host_waits.waits_of(case, setting.device, "bf16")
    print("\n".join(found))
    reads = [each for each in found if not each.startswith("synchronize")]
    assert len(reads) <= 2, "\n".join(reads)  # one a step
    return [Figure(f"waits of the host in a step of {name}", [len(found) / 2], unit="")]


CASES = [
    *(
        case_of(
            f"host waits, {precision}",
            [
                # torch's DDP waits itself where the device is not CUDA.
                Case(name, wait, {"case": case, "precision": precision}, only_on="cuda" if name == "ddp" else "")
                for name, case in WITHOUT_OFFLOAD.items()
            ],
        )
        for precision in ("fp32", "bf16", "fp16")
    ),
    case_of(
        "host waits, offload",
        [
            *(Case(name, list_waits, {"name": name, "case": case}) for name, case in OFFLOAD.items()),
            *(
                Case(f"{name}, two batches", wait_for_nothing_in_passes, {"case": case})
                for name, case in host_waits.OFFLOADED.items()
            ),
        ],
    ),
]
