"""Run the examples as scripts, each in a new process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def run_example():
    """Run an example in a folder, in one process or on several ranks under torchrun, and return its output.

    ``through`` names a script that prepares the process and then runs the example.
    """

    def run(name, *arguments, cwd, nproc=None, through=None, timeout=240):
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"] if nproc else []
        done = subprocess.run(
            [sys.executable, *launcher, *([str(through)] if through else []), str(EXAMPLES / name), *arguments],
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        return done.stdout

    return run
