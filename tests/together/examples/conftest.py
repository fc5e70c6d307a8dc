"""Run the examples as scripts, in forks of a process that has their imports."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked_scripts import torchrun_variables

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="session")
def run_example(scripts):
    """Run an example in a folder, in one process or on several ranks, and return its output.

    ``through`` names a script that prepares the process, a new one, and then runs the example.
    """

    def run(name, *arguments, cwd, nproc=None, through=None, timeout=240):
        if through is None:
            variables = torchrun_variables(nproc) if nproc else ()
            ended = scripts.run(EXAMPLES / name, [arguments] * (nproc or 1), variables, cwd)
            assert set(ended.codes) == {0}, ended.output[-6000:]
            return ended.output
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"] if nproc else []
        done = subprocess.run(
            [sys.executable, *launcher, str(through), str(EXAMPLES / name), *arguments],
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
