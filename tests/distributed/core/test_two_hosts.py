"""Two hosts: network namespaces with a cable between them, each with a torchrun of its own.

Both have the same name, as cloned machines and containers may, and a loopback that does not reach the other.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "pretrain_bytes.py"
ADDRESSES = ("192.0.2.1", "192.0.2.2")  # set aside for documentation, and here known to the two namespaces only
LIMIT_SECONDS = 30.0
"""What Booster promises, from a host's death to the end of the processes on the other."""
TORCHRUN_SECONDS = 30.0
"""How long torchrun itself may take to end after its processes have."""


def static(number):
    """Return torchrun's options for host ``number`` under the static rendezvous."""
    return [f"--master-addr={ADDRESSES[0]}", "--master-port=29500", f"--node-rank={number}"]


def c10d(number):
    """Return torchrun's options for host ``number`` under the rendezvous that allows restarts of several nodes."""
    return [
        "--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:29400", "--rdzv-id=restarts", "--max-restarts=1",
        f"--rdzv-conf=is_host={number == 0}", f"--local-addr={ADDRESSES[number]}",
    ]  # fmt: skip


def _ip(*arguments):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False, timeout=30)
    if done.returncode != 0:
        raise OSError(done.stderr.strip() or f"ip ended with {done.returncode}")
    return done.stdout


class Hosts:
    """Two namespaces, and what runs in them."""

    def __init__(self, folder):
        self.names = [f"booster-{os.getpid()}-{letter}" for letter in "ab"]
        self.folder = folder
        self.processes = []

    def connect(self):
        for name in self.names:
            _ip("netns", "add", name)
        one, other = self.names
        _ip("link", "add", "cable", "netns", one, "type", "veth", "peer", "name", "cable", "netns", other)
        for name, address in zip(self.names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/30", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def torchrun(self, script, *arguments, options=static):
        """Start a process of the script on each host."""
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        # Neither host's name stands for its end of the cable.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable"}
        for number, name in enumerate(self.names):
            with self.screen(number).open("wb") as screen:
                own = options(number)
                where = ["ip", "netns", "exec", name, *command, *own]
                self.processes.append(
                    subprocess.Popen(
                        [*where, str(script), *map(str, arguments)],
                        cwd=self.folder,
                        env=environment,
                        stdout=screen,
                        stderr=subprocess.STDOUT,
                    )
                )

    def screen(self, number):
        return self.folder / f"screen{number}"

    def output(self, number):
        return self.screen(number).read_text(errors="replace")

    def wait(self, number, timeout):
        try:
            return self.processes[number].wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"host {number} had not ended after {timeout:g} s:\n{self.output(number)}")

    def kill(self, number):
        """End all processes of a host at once, so that none can say goodbye."""
        for pid in map(int, _ip("netns", "pids", self.names[number]).split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def unplug(self, number):
        """Cut a host off, as the others see one that has lost power: its connections stay open."""
        _ip("-n", self.names[number], "link", "set", "cable", "down")

    def plug(self, number):
        _ip("-n", self.names[number], "link", "set", "cable", "up")

    def remove(self):
        existing = _ip("netns", "list").split()
        for number, name in enumerate(self.names):
            if name in existing:
                self.kill(number)
        for process in self.processes:
            process.kill()
            process.wait()
        for name in self.names:
            if name in existing:
                _ip("netns", "delete", name)


@pytest.fixture
def hosts(tmp_path):
    if shutil.which("ip") is None:
        pytest.skip("needs the command `ip` of iproute2")
    if os.geteuid() != 0:
        pytest.skip("only root can make network namespaces")
    two = Hosts(tmp_path)
    try:
        try:
            two.connect()
        except OSError as error:
            pytest.skip(f"network namespaces with a cable between them can't be made here: {error}")
        yield two
    finally:
        two.remove()


@pytest.mark.slow  # the tests below train on two hosts, without the demo's start
def test_the_demo_runs_on_two_hosts(hosts, tmp_path):
    size = ["--steps", 3, "--batch-size", 4, "--hidden", 64, "--layers", 2, "--corpus-bytes", 300000]
    hosts.torchrun(EXAMPLE, *size, "--out", "out")
    assert [hosts.wait(number, 240) for number in range(2)] == [0, 0], hosts.output(0) + hosts.output(1)
    assert "world      2 rank(s)" in hosts.output(0)
    assert "mean of the last 10 steps" in hosts.output(0)
    assert "validation loss" in hosts.output(0)
    assert "loss" not in hosts.output(1)
    for number in range(2):
        assert "Warning" not in hosts.output(number)
    assert (tmp_path / "out/model.safetensors.index.json").exists()


def test_ranks_know_that_they_share_no_host(hosts, tmp_path):
    script = tmp_path / "facts.py"
    script.write_text(
        textwrap.dedent("""
        import json, socket
        from booster_core import launch_from_torch
        from booster_core.ranks.host import this_host
        c = launch_from_torch(verbose=False)
        seen = c.all_gather_object(this_host())
        print(json.dumps({
            "rank": c.rank, "local_rank": c.local_rank, "name": socket.gethostname(), "hosts": len(set(seen))
        }), flush=True)
        """)
    )
    hosts.torchrun(script)
    assert [hosts.wait(number, 120) for number in range(2)] == [0, 0], hosts.output(0) + hosts.output(1)
    for number in range(2):
        assert f'"rank": {number}, "local_rank": 0' in hosts.output(number)
        assert '"hosts": 2' in hosts.output(number)
        assert "Warning" not in hosts.output(number)


SAVE = """
import os
from pathlib import Path
import torch
from torch import nn
from booster_core import Booster, launch_from_torch
c = launch_from_torch(verbose=False)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(300, 512), nn.Linear(512, 512), nn.Linear(512, 512))
booster = Booster("cpu", None, "zero")
model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
booster.backward(model(torch.ones(2, 300)).sum(), optimizer)
optimizer.step()
wrote, real = set(), os.pwrite

def pwrite(descriptor, *rest):
    wrote.add(Path(f"/proc/self/fd/{descriptor}").readlink().name.split(".")[1])
    return real(descriptor, *rest)

os.pwrite = pwrite
booster.save_checkpoint("run", step=1, model=model, optimizer=optimizer, size_per_shard=1)
print(f"rank {c.rank} wrote {sorted(wrote)}", flush=True)
values = {name: value.clone() for name, value in model.unwrap().state_dict().items()}
with torch.no_grad():
    for parameter in model.unwrap().parameters():
        parameter.zero_()
loaded = booster.load_checkpoint("run", model=model, optimizer=optimizer)
same = all(torch.equal(value, values[name]) for name, value in model.unwrap().state_dict().items())
print(f"rank {c.rank} loaded step {loaded.step}: {same}", flush=True)
"""


def test_a_checkpoint_of_two_hosts_has_one_writer_for_each_file(hosts, tmp_path):
    script = tmp_path / "save.py"
    script.write_text(SAVE)
    hosts.torchrun(script)
    assert [hosts.wait(number, 120) for number in range(2)] == [0, 0], hosts.output(0) + hosts.output(1)
    wrote = []
    for number in range(2):
        assert f"rank {number} loaded step 1: True" in hosts.output(number)
        (line,) = (line for line in hosts.output(number).splitlines() if f"rank {number} wrote" in line)
        wrote.append({name.strip("'") for name in line.partition("[")[2].rstrip("]").split(", ")})
    assert min(map(len, wrote)) > 1
    assert not wrote[0] & wrote[1]


RESTARTED = """
import os, sys
from pathlib import Path
from booster_core import launch_from_torch

c = launch_from_torch(verbose=False, timeout_seconds=40)
failed = Path("failed")
if c.rank == int(sys.argv[1]) and not failed.exists():
    failed.touch()
    raise RuntimeError("the error of the first attempt")
print(f"rank {c.rank} met {c.all_gather_object(c.rank)}", flush=True)
"""


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_hosts_meet_again_after_a_rank_failed(hosts, tmp_path, victim, monkeypatch):
    # Without the monitor the other host's rank does not fail: only one of the agents counts a restart.
    monkeypatch.setenv("BOOSTER_MONITOR", "0")
    script = tmp_path / "train.py"
    script.write_text(RESTARTED)
    hosts.torchrun(script, victim, options=c10d)
    assert [hosts.wait(number, 200) for number in range(2)] == [0, 0], hosts.output(0) + hosts.output(1)
    assert "the error of the first attempt" in hosts.output(victim)
    for number in range(2):
        assert f"rank {number} met [0, 1]" in hosts.output(number)


TRAINING = """
import sys, time
import torch, torch.distributed as dist
from booster_core import launch_from_torch
c = launch_from_torch(verbose=False, timeout_seconds=float(sys.argv[1]))
last = int(sys.argv[2])
for step in range(10**6):
    if step <= last:
        dist.all_reduce(torch.ones(1))
        if step % 5 == 0:
            c.rendezvous("step")
    if step == int(sys.argv[3]):
        break
    print("step", step, flush=True)
    time.sleep(0.1)
"""


def _start_training(hosts, tmp_path, *, timeout_seconds, collectives_until=10**6, end=-1):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAINING))
    hosts.torchrun(script, timeout_seconds, collectives_until, end)
    deadline = time.monotonic() + 90
    while any("step 7" not in hosts.output(number) for number in range(2)):
        assert time.monotonic() < deadline, hosts.output(0) + hosts.output(1)
        time.sleep(0.1)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_when_the_processes_of_a_host_die_the_other_ends(hosts, tmp_path, victim):
    _start_training(hosts, tmp_path, timeout_seconds=600)
    hosts.kill(victim)
    other = 1 - victim
    assert hosts.wait(other, LIMIT_SECONDS + TORCHRUN_SECONDS) != 0, hosts.output(other)
    assert f"Booster: rank {victim}" in hosts.output(other)
    assert "died without a traceback" in hosts.output(other)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_host_that_vanishes_is_given_up_at_the_time_limit(hosts, tmp_path, victim):
    # No collectives any more, which would time out, too.
    _start_training(hosts, tmp_path, timeout_seconds=15, collectives_until=5)
    start = time.monotonic()
    hosts.unplug(victim)
    other = 1 - victim
    assert hosts.wait(other, 15 + LIMIT_SECONDS + TORCHRUN_SECONDS) != 0, hosts.output(other)
    assert time.monotonic() - start > 14
    assert f"Booster: rank {victim}" in hosts.output(other)
    assert "could not be reached for 15 s: its machine or the network is down" in hosts.output(other)


@pytest.mark.slow
@pytest.mark.parametrize("side", [0, 1])
def test_training_outlasts_a_network_that_fails_for_a_while(hosts, tmp_path, side):
    _start_training(hosts, tmp_path, timeout_seconds=600, end=60)
    hosts.unplug(side)
    time.sleep(25)
    before = [hosts.output(number).count("step") for number in range(2)]
    assert [process.poll() for process in hosts.processes] == [None, None], hosts.output(0) + hosts.output(1)
    hosts.plug(side)
    assert [hosts.wait(number, 120) for number in range(2)] == [0, 0], hosts.output(0) + hosts.output(1)
    for number in range(2):
        assert hosts.output(number).count("step") > before[number]
        assert "Booster" not in hosts.output(number)
