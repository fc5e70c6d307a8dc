from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass

import pytest
from forked_scripts import Result
from free_ports import free_port
from matrix import matrix
from patience import is_alive

LIMIT_SECONDS = 30.0
"""What Booster promises, from the failure to the end of the last process."""

SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
from booster_core.ranks.coordinator import DistCoordinator
from booster_core.ranks.launch import launch, launch_from_torch

from booster_runtime.watch import member

member.GRACE_SECONDS = 0.5
what, victim, where = sys.argv[1], int(sys.argv[2]), sys.argv[3]

def tell(*words):
    # In one piece, or the processes' lines mix.
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

if where == "launch":
    tell("PID", os.getpid())
if where == "launch" and sys.argv[4] == str(victim):
    opened = dist.init_process_group

    def open_wrongly(*args, **kwargs):
        tell("FAILS", time.time())
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os.environ["GLOO_SOCKET_IFNAME"] = "nowhere"
        opened(*args, **kwargs)

    dist.init_process_group = open_wrongly
if len(sys.argv) > 4:
    c = launch(int(sys.argv[4]), int(sys.argv[5]), "127.0.0.1", int(sys.argv[6]), verbose=False)
else:
    c = launch_from_torch(verbose=False)
dist.all_reduce(torch.ones(1))
tell("PID", os.getpid())

def innermost_cause():
    raise ZeroDivisionError("the original error")

def fail():
    time.sleep(1.0)
    tell("FAILS", time.time())
    if what == "raise":
        innermost_cause()
    elif what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "exit":
        os._exit(3)
    elif what == "sys.exit":
        sys.exit(3)
    elif what == "sys.exit with words":
        sys.exit("no such data")
    elif what == "sys.exit after an error":
        try:
            innermost_cause()
        except ZeroDivisionError:
            sys.exit(1)
    elif what == "fork":
        if os.fork() == 0:
            tell("PID", os.getpid())
            time.sleep(40)
            os._exit(0)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "hook":
        sys.excepthook = sys.__excepthook__
        innermost_cause()
    elif what == "caught":
        try:
            innermost_cause()
        except ZeroDivisionError:
            pass
        try:
            sys.exit(3)
        except SystemExit as error:
            assert error.code == 3
        if os.fork() == 0:
            sys.exit(4)
        assert os.WEXITSTATUS(os.wait()[1]) == 4
        c.block_all(name="end")
        tell("FINE")
        sys.exit(0)

def wait():
    if what == "caught":
        c.block_all(name="end")
        tell("FINE")
    elif where == "collective":
        dist.all_reduce(torch.ones(1))
        time.sleep(300)
    elif where == "sleep":
        time.sleep(300)
    elif where == "rendezvous":
        c.block_all(name="step", timeout_seconds=300)
    elif where == "loop":
        while True:
            sum(range(1000))

fail() if c.rank == victim else wait()
"""


@dataclass
class Run:
    codes: list[int]
    output: str
    seconds: float


@pytest.fixture
def script(tmp_path):
    """A script whose ranks end soon after another's failure, to save the tests' time."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def run_script(scripts):
    """Return a function that runs a script by hand, once for each list of arguments, until all have ended."""

    def run(script, *arguments, leaves_children=False):
        return _checked(scripts.run(script, arguments), leaves_children=leaves_children)

    return run


@pytest.fixture
def run_text(run_script, tmp_path):
    """Return a function that runs a script of the test by hand, once for each list of arguments."""

    def run(text, *arguments):
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text))
        return run_script(path, *arguments)

    return run


@pytest.fixture
def run_ranks(run_script):
    """Return a function that runs the script above by hand on several ranks."""

    def run(script, num_ranks, what, victim, where, *, leaves_children=False):
        port = free_port()
        each = [(what, victim, where, rank, num_ranks, port) for rank in range(num_ranks)]
        return run_script(script, *each, leaves_children=leaves_children)

    return run


def run_by_torchrun(script, num_ranks, what, victim, where):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    done = subprocess.run(
        [*command, script, what, str(victim), where],
        cwd=script.parent, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return _checked(Result([done.returncode], done.stdout, time.time()))


def _checked(result, *, leaves_children=False):
    """Return what a run left; its processes have ended, and children that live on where they do are ended here."""
    words = [line.split() for line in result.output.splitlines()]
    start = next((float(line[1]) for line in words if line[:1] == ["FAILS"]), result.end)
    for pid in [int(line[1]) for line in words if line[:1] == ["PID"]]:
        if leaves_children and is_alive(pid):
            os.kill(pid, signal.SIGKILL)
        else:
            assert not is_alive(pid), result.output
    # What else the machine does is not promised.
    return Run(result.codes, result.output, result.end - start - result.queued_seconds)


@matrix(["rendezvous-0"], where=["collective", "sleep", "rendezvous", "loop"], victim=[0, 1])
def test_an_exception_ends_all_and_is_named_once(run_ranks, script, victim, where):
    run = run_ranks(script, 2, "raise", victim, where)
    assert run.codes == [1, 1], run.output
    assert run.seconds < LIMIT_SECONDS
    assert run.output.count(f"Booster: rank {victim} failed: ZeroDivisionError: the original error\n") == 1, run.output
    assert "innermost_cause" in run.output
    assert run.output.count("Traceback") == 1, run.output
    assert f"Booster: all 2 ranks end. Rank {victim} was process " in run.output, run.output
    assert f"rank {victim} last finished `launch` #1" in run.output, run.output
    assert where != "rendezvous" or f"rank {1 - victim} entered `step` #1" in run.output, run.output


# Each start of torchrun takes three interpreters; the test above has the others' places and victims.
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("where", ["collective", pytest.param("sleep", marks=pytest.mark.slow)])
def test_torchruns_report_ends_with_the_original_traceback(script, victim, where):
    run = run_by_torchrun(script, 2, "raise", victim, where)
    assert run.codes == [1], run.output
    assert run.seconds < LIMIT_SECONDS
    report = run.output.partition("Root Cause")[2]
    assert "innermost_cause" in report, run.output
    assert f"(local_rank: {victim})" in report, run.output
    assert report.rstrip().rstrip("=").rstrip().endswith("ZeroDivisionError: the original error"), run.output


@matrix(["exit-3-sleep-0"], **{"what, code": [("kill", -9), ("exit", 3)]}, where=["collective", "sleep"], victim=[0, 1])
def test_a_death_without_words_ends_all_and_is_told(run_ranks, script, victim, where, what, code):
    run = run_ranks(script, 2, what, victim, where)
    assert run.codes[victim] == code, run.output
    assert run.codes[1 - victim] == 1, run.output
    assert run.seconds < LIMIT_SECONDS
    assert run.output.count(f"Booster: rank {victim} died without a traceback: killed by a signal") == 1, run.output
    assert run.output.count("Traceback") == 0, run.output


@pytest.mark.parametrize("victim", [0, 1])
def test_children_that_live_on_do_not_hide_a_death(run_ranks, script, victim):
    run = run_ranks(script, 2, "fork", victim, "sleep", leaves_children=True)
    assert run.codes[1 - victim] == 1, run.output
    assert run.seconds < LIMIT_SECONDS
    assert "died without a traceback" in run.output


@matrix(
    ["sys.exit with words-1-rendezvous-1"],
    **{"what, code": [("sys.exit", 3), ("sys.exit with words", 1), ("sys.exit after an error", 1)]},
    where=["collective", "rendezvous"],
    victim=[0, 1],
)
def test_ranks_that_wait_for_one_that_has_left_by_sys_exit_end(run_ranks, script, victim, where, what, code):
    run = run_ranks(script, 2, what, victim, where)
    assert run.codes[victim] == code, run.output
    assert run.codes[1 - victim] == 1, run.output
    assert run.seconds < LIMIT_SECONDS
    if where == "rendezvous":
        named = f"rank {victim} ended normally while rank {1 - victim} waits in `step` #1, which it never called."
        assert named in run.output, run.output
        assert "The monitor can't see the code of a `sys.exit`" in run.output


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_whose_group_cannot_be_opened_ends_all(run_ranks, script, victim):
    run = run_ranks(script, 2, "raise", victim, "launch")
    assert run.codes == [1, 1], run.output
    assert run.seconds < LIMIT_SECONDS
    named = f"Booster: rank {victim} failed: LaunchError: Rank {victim} could not start the process group of backend"
    assert named in run.output, run.output
    assert "GLOO_SOCKET_IFNAME" in run.output


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_while_the_group_is_opened_ends_all(run_ranks, script, victim):
    run = run_ranks(script, 2, "kill", victim, "launch")
    assert run.codes[victim] == -9, run.output
    assert run.codes[1 - victim] == 1, run.output
    assert run.seconds < LIMIT_SECONDS
    assert f"rank {victim}" in run.output


def test_the_monitor_can_be_turned_off(run_text, monkeypatch):
    monkeypatch.setenv("BOOSTER_MONITOR", "0")
    script = """
        import os, signal, sys, threading, time, warnings
        warnings.simplefilter("error")
        from booster_core.ranks.launch import launch
        from booster_core.ranks.world import current_world
        c = launch(int(sys.argv[1]), 2, "127.0.0.1", int(sys.argv[2]), verbose=False)
        assert current_world().monitor is None
        assert not any("monitor" in thread.name for thread in threading.enumerate())
        c.block_all(name="step")
        if c.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(4)
        """
    port = str(free_port())
    run = run_text(script, (0, port), (1, port))
    assert run.codes == [0, -9], run.output
    assert "Booster" not in run.output


TORCH_COLLECTIVES = """
import sys, threading, time
import torch, torch.distributed as dist
from booster_core.ranks.launch import launch
from booster_runtime.watch import flight_recorder
what, rank = sys.argv[1], int(sys.argv[2])
if what == "missing":  # as if its watchdog aborted, as NCCL's does
    flight_recorder._expiry = lambda entry, _: time.monotonic() + 8 - (time.time_ns() - entry["time_created_ns"]) / 1e9
limit = 60
launch(rank, 2, "127.0.0.1", int(sys.argv[3]), verbose=False, timeout_seconds=limit)
if what == "operation":
    dist.all_reduce(torch.ones(4)) if rank else dist.barrier()
elif what == "groups":
    for group in [dist.new_group([0, 1]) for _ in range(2)][:: 1 - 2 * rank]:
        dist.all_reduce(torch.ones(4), group=group)
elif what == "missing" and rank == 0:
    dist.all_reduce(torch.ones(4))
elif what == "thread":
    if rank == 1:
        threading.Thread(target=time.sleep, args=(300,)).start()
        print("FAILS", time.time(), flush=True)
        raise ZeroDivisionError("the original error")
time.sleep(100)
"""


SAID = {
    "operation": "the ranks wait for each other in different calls: rank 0 waits in `",
    "groups": "the ranks wait for each other in different calls: rank 0 waits in `all_reduce` of 4 Float",
    "missing": "has come to its time limit: rank 1 has not reached it; it last finished `launch`",
}


@matrix(["groups", "missing"], what=SAID)  # test_verdicts.py has what is said of which calls
def test_ranks_that_torchs_collectives_keep_are_named_before_the_time_limit(run_text, what):
    port = str(free_port())
    run = run_text(TORCH_COLLECTIVES, (what, 0, port), (what, 1, port))
    assert run.codes == [1, 1], run.output
    assert SAID[what] in run.output, run.output


def test_threads_that_go_on_keep_a_failed_rank_for_a_short_time(run_text):
    port = str(free_port())
    run = run_text(TORCH_COLLECTIVES, ("thread", 0, port), ("thread", 1, port))
    assert run.codes == [1, 1], run.output
    assert "Booster: rank 1 failed: ZeroDivisionError: the original error" in run.output
    assert run.seconds < 14, run.output  # the limit for what ends by itself is 20


def test_the_monitors_switch_is_checked_before_anything_is_opened(run_text, monkeypatch):
    monkeypatch.setenv("BOOSTER_MONITOR", "off")
    run = run_text("from booster_core.ranks.launch import launch\nlaunch(0, 2, '127.0.0.1', 1)\n", ())
    assert run.codes == [1], run.output
    assert "BOOSTER_MONITOR='off' must be 1 (ranks learn at once when one dies) or 0." in run.output


def test_an_excepthook_of_the_script_does_not_hide_a_failure(run_ranks, script):
    run = run_ranks(script, 2, "hook", 1, "sleep")
    assert run.codes == [1, 1], run.output
    assert run.seconds < LIMIT_SECONDS
    assert "ZeroDivisionError: the original error" in run.output


def test_what_the_script_catches_ends_nothing(run_ranks, script):
    run = run_ranks(script, 2, "caught", 1, "-")
    assert run.codes == [0, 0], run.output
    assert run.output.count("FINE") == 2


def test_an_interrupt_behaves_as_usual(run_text):
    script = """
        import sys, os, signal, time
        from booster_core.ranks.launch import launch
        launch(int(sys.argv[1]), 2, "127.0.0.1", int(sys.argv[2]), verbose=False)
        if sys.argv[1] == "1":
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(300)
        """
    port = str(free_port())
    run = run_text(script, (0, port), (1, port))
    assert run.codes == [1, -2], run.output
    assert "KeyboardInterrupt" in run.output
