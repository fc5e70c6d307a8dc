"""Five steps of a small Llama under every plugin equal one process, and a saved run goes on when it is loaded."""

from dataclasses import replace

import device_smoke

from device_runs.cases import Case

SIZES = {"tp_size", "sp_size", "pp_size"}
ONLY_ACROSS = {"sequence_parallelism_mode", "num_microbatches", "pp_style", "num_model_chunks"}
"""Options that mean something where several ranks hold one model."""


def train(setting, *, case, precision):
    """Train, compare with one process, save, load into a new run, and compare its next step."""
    device_smoke.train(case, setting.device, precision, str(setting.folder))


def alone(case):
    """Return a case with its options for one rank."""
    options = {name: value for name, value in case.options.items() if name not in SIZES | ONLY_ACROSS}
    return replace(case, options=options, world_size=1)


CASES = [
    Case(
        f"{name}, {precision}, one rank",
        train,
        {"case": alone(case), "precision": precision},
    )
    for name, case in device_smoke.CASES.items()
    if case.plugin != "hybrid" or name == "pipeline, zero 1"
    for precision in ("fp32", "bf16", "fp16")
] + [
    Case(
        f"{name}, {precision}, {case.world_size} ranks",
        train,
        {"case": case, "precision": precision},
        ranks=case.world_size,
        seconds=120,
    )
    for name, case in device_smoke.CASES.items()
    for precision in ("fp32", "bf16")
]
