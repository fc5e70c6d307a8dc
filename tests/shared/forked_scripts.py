"""Run scripts in forks of one process that has imported what they import, which takes longer than the scripts do.

Usage: ``python forked_scripts.py JOBS RESULTS``. ``JOBS`` is a JSON file with a list of objects: the ``script``, its
``folder``, the number of ``ranks`` that run it, and the folders of its ``path``. ``RESULTS`` gets a list of objects:
the exit ``codes`` and the ``output`` of all ranks together.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

JOB_SECONDS = 120.0
_IMPORTED = (
    *("torch._dynamo", "torch.distributed.fsdp", "torch.utils.data", "transformers.models.llama.modeling_llama"),
    *("peft", "booster_core", "booster_ddp", "booster_fsdp", "booster_zero", "booster_gemini", "booster_hybrid"),
    *("booster_runtime.checkpoint", "booster_runtime.liveness", "booster_testing.conformance"),
)
"""What the scripts import themselves, each for seconds."""


def _main() -> None:
    for name in _IMPORTED:
        importlib.import_module(name)
    jobs, results = Path(sys.argv[1]), []
    for job in json.loads(jobs.read_text()):
        with tempfile.TemporaryFile("w+") as screen:
            port, children = _free_port(), []
            for rank in range(job["ranks"]):
                child = os.fork()
                if child == 0:  # goes on as a new interpreter would, up to its normal end
                    _become_rank(job, rank, port, screen.fileno())
                    runpy.run_path(job["script"], run_name="__main__")
                    return
                children.append(child)
            codes = _wait(children)
            screen.seek(0)
            results.append({"codes": codes, "output": screen.read()})
    Path(sys.argv[2]).write_text(json.dumps(results))


def _become_rank(job: dict[str, Any], rank: int, port: int, screen: int) -> None:
    """Set up a fork as torchrun and a shell set up a process."""
    os.dup2(screen, 1)
    os.dup2(screen, 2)
    os.chdir(job["folder"])
    sys.argv[:] = [job["script"]]
    sys.path[:1] = [str(Path(job["script"]).parent), *job["path"]]
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["ranks"], "LOCAL_WORLD_SIZE": job["ranks"]}
    if job["ranks"] > 1:
        os.environ.update({name: str(value) for name, value in ranks.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})


def _wait(children: list[int]) -> list[int]:
    """Return the children's exit codes; kill those that take too long."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + JOB_SECONDS
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                if time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    codes[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return [codes[child] for child in children]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    _main()
