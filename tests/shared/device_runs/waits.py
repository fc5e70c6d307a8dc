"""The host waits for nothing in a step without offload; with it, for copies alone, which are listed."""

import device_smoke
import host_waits

from device_runs.cases import Figure
from device_runs.parts import Part, case_of

OFFLOAD = {
    "fsdp, offload": device_smoke.Case("fsdp", {"cpu_offload": True}),
    "zero 2, offload": device_smoke.Case("zero", {"stage": 2, "offload": "cpu"}),
    "gemini, offload": device_smoke.Case(
        "gemini", {"min_chunk_bytes": 1 << 15, "offload_param_frac": 1.0, "offload_optim_frac": 1.0}
    ),
}


def wait_for_nothing(setting, *, case, precision):
    """Train eight steps; from the fifth on nothing is waited for."""
    found, seen = host_waits.waits_of(case, setting.device, precision)
    assert seen == 3, "what is looked for is found"
    assert not found, "\n".join(found)


def wait_once(setting, *, case):
    """Under fp16's loss scale the host asks once a step whether to skip it."""
    found, seen = host_waits.waits_of(case, setting.device, "fp16")
    assert seen == 3, "what is looked for is found"
    assert len(found) == 2, "\n".join(found)
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
                Part(name, wait_for_nothing, {"case": case, "precision": precision}, only_on=only_on)
                for name, case, only_on in (
                    # torch's DDP waits itself where the device is not CUDA.
                    ("ddp", device_smoke.Case("ddp"), "cuda"),
                    *((name, case, "") for name, case in host_waits.CASES.items()),
                    ("zero 2", device_smoke.Case("zero", {"stage": 2}), ""),
                )
            ],
        )
        for precision in ("fp32", "bf16")
    ),
    case_of(
        "host waits, fp16",
        [
            Part(name, wait_once, {"case": case}, only_on="cuda" if name == "ddp" else "")
            for name, case in (("ddp", device_smoke.Case("ddp")), *host_waits.CASES.items())
        ],
    ),
    case_of(
        "host waits, offload",
        [
            *(Part(name, list_waits, {"name": name, "case": case}) for name, case in OFFLOAD.items()),
            *(
                Part(f"{name}, two batches", wait_for_nothing_in_passes, {"case": case})
                for name, case in host_waits.OFFLOADED.items()
            ),
        ],
    ),
]
