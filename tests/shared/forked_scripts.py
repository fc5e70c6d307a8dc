"""Run scripts in forks of one process that has imported what they import, which takes longer than the scripts do.

The process reads jobs from its standard input and writes their results to its standard output, a JSON object a line.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from free_ports import free_port

JOB_SECONDS = 300.0
"""Time limit of a script; a busy machine takes minutes for what an idle one does in ten seconds."""
_IMPORTED = (
    *("torch._dynamo", "torch.distributed.fsdp", "torch.utils.data", "transformers.models.llama.modeling_llama"),
    *("peft", "booster_core", "booster_ddp", "booster_fsdp", "booster_zero", "booster_gemini", "booster_hybrid"),
    *("booster_checkpoint", "booster_runtime.watch", "booster_testing.conformance"),
)
"""What the scripts import themselves, each for seconds."""


@dataclass
class Result:
    """What the processes of a script left.

    Attributes:
        codes: Their exit codes, negative for signals.
        output: What they printed, all together.
        end: The time when the last had ended.
        queued_seconds: For how long the main thread of one of them, the slowest, waited for a processor.
    """

    codes: list[int]
    output: str
    end: float
    queued_seconds: float = 0.0


class ForkedScripts:
    """The process that runs scripts."""

    def __init__(self, process):
        self._process = process

    def run(self, script, arguments, environments=(), folder=None):
        """Run a script, once for each list of arguments, all at the same time.

        Args:
            script: The script.
            arguments: The arguments of each process.
            environments: What each has in its environment on top of this process' variables, if anything.
            folder: The folder to run it in; its own if ``None``.
        """
        each = [{**os.environ, **own} for own in environments or [{}] * len(arguments)]
        job = {"script": str(script), "arguments": [list(map(str, own)) for own in arguments], "environments": each}
        job["folder"] = str(folder or Path(script).parent)
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return Result(**json.loads(self._process.stdout.readline()))


@contextlib.contextmanager
def forked_scripts():
    """Start the process that runs scripts, and end it."""
    process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            yield ForkedScripts(process)
        finally:
            process.kill()


def torchrun_variables(num_ranks):
    """Return the variables that torchrun sets for each rank of a new run on this host."""
    shared = {
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": free_port(),
    }
    each = [{"RANK": rank, "LOCAL_RANK": rank, **shared} for rank in range(num_ranks)]
    return [{name: str(value) for name, value in own.items()} for own in each]


def _main():
    gc.disable()  # nothing that is imported is garbage
    for name in _IMPORTED:
        with contextlib.suppress(ModuleNotFoundError):  # the tests of a wheel have only what that needs
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that the forks' garbage collections leave the shared memory alone
    gc.enable()
    for line in sys.stdin:
        job = json.loads(line)
        with tempfile.TemporaryFile("w+") as screen:
            children = []
            for number in range(len(job["arguments"])):
                child = os.fork()
                if child == 0:  # goes on as a new interpreter would, up to its normal end
                    _become(job, number, screen.fileno())
                    runpy.run_path(job["script"], run_name="__main__")
                    return
                children.append(child)
            codes, queued_seconds = _wait(children)
            result = {"codes": codes, "end": time.time(), "queued_seconds": queued_seconds}
            screen.seek(0)
            print(json.dumps({**result, "output": screen.read()}), flush=True)


def _become(job, number, screen):
    """Set up a fork as a shell sets up a process."""
    os.register_at_fork(after_in_child=gc.unfreeze)  # torch hangs at the end of a fork of a frozen process
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    nothing = os.open(os.devnull, os.O_RDONLY)
    for ours, theirs in ((nothing, 0), (screen, 1), (screen, 2)):
        os.dup2(ours, theirs)
    os.chdir(job["folder"])
    sys.argv[:] = [job["script"], *job["arguments"][number]]
    sys.path[0] = str(Path(job["script"]).parent)
    os.environ.clear()
    os.environ.update(job["environments"][number])


def _wait(children):
    """Return the children's exit codes, and how long one of them waited for a processor; kill those that hang."""
    codes = {}
    queued = 0
    deadline = time.monotonic() + JOB_SECONDS
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                with contextlib.suppress(OSError, ValueError, IndexError):  # a kernel that does not tell
                    text = Path(f"/proc/{child}/schedstat").read_text(encoding="ascii")
                    queued = max(queued, int(text.split()[1]))
                if time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    codes[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return [codes[child] for child in children], queued * 1e-9


if __name__ == "__main__":
    _main()
