"""``python -m device_runs [--into FOLDER] [--minutes MINUTES] [--side-by-side N] [--list] [NAME ...]``."""

import argparse
import os
import sys
from pathlib import Path

# Before torch is imported: ranks are forked from a process that asked for CUDA devices, which must not open one.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from device_runs import report, runner
from device_runs.cases import all_cases


def main():
    """Run the cases and return 1 if one failed; 0 where there is no CUDA device."""
    parser = argparse.ArgumentParser(prog="device_runs", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="names of the cases to run, or parts of them; all by default"
    )
    parser.add_argument("--into", type=Path, default=Path("device-report"), help="the folder of the report")
    parser.add_argument("--minutes", type=float, default=7.5, help="what has not begun by then is left out")
    parser.add_argument("--side-by-side", type=int, default=max((os.cpu_count() or 1) // 2, 4), help="ranks at a time")
    parser.add_argument("--simulated", metavar="LIBRARY", default="", help="run on the simulated accelerator instead")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    asked = parser.parse_args()
    chosen = _named(asked.names)
    if asked.list:
        print("\n".join(case.name for case in chosen))
        return 0
    if asked.simulated:
        machine = runner.Machine("simulated", 1, asked.simulated, asked.side_by_side)
    elif torch.cuda.is_available():
        machine = runner.Machine("cuda", torch.cuda.device_count(), "", asked.side_by_side)
    else:
        print("no GPU: nothing measured")
        return 0
    folder = asked.into.absolute()
    (folder / "output").mkdir(parents=True, exist_ok=True)
    facts = _facts(machine)
    outcomes = []

    def tell(outcome):
        outcomes.append(outcome)
        print(f"{outcome.status:8} {outcome.seconds:5.1f} s  {outcome.name}", flush=True)
        report.write(folder, facts, outcomes, is_complete=len(outcomes) == len(chosen))

    runner.run(chosen, machine, folder / "output", asked.minutes * 60, tell)
    print(f"report: {folder / 'report.md'}")
    return int(any(outcome.status == "failed" for outcome in outcomes))


def _named(names):
    """Return the cases of these names; a name that no case has stands for those that it is a part of."""
    cases = all_cases()
    parts = [name for name in names if name not in cases]
    return [
        case for case in cases.values() if not names or case.name in names or any(part in case.name for part in parts)
    ]


def _facts(machine):
    """Ask the device in a process of its own: this one's must not open it."""
    import multiprocessing

    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(report.describe, (machine,))


if __name__ == "__main__":
    sys.exit(main())
