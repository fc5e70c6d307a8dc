"""``booster env`` and ``booster doctor`` where there is a device."""

import subprocess
import sys

import torch

from device_runs.cases import Case

SECONDS = 80


def tell(setting, *, verb):
    """Run a command in a process of its own; it succeeds and names the device."""
    call = f"from booster_core.cli import main; main(['{verb}'])"
    done = subprocess.run(
        [sys.executable, "-c", call], capture_output=True, text=True, timeout=SECONDS, check=False, cwd=setting.folder
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    if setting.is_real:
        name = torch.cuda.get_device_name()
        assert name in done.stdout, done.stdout


CASES = [Case(f"booster {verb}", tell, {"verb": verb}, seconds=SECONDS + 10) for verb in ("env", "doctor")]
