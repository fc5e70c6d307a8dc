"""Two hosts: network namespaces with a cable between them, each with a torchrun of its own.

Both have the same name, as cloned machines and containers may, and a loopback that does not reach the other.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys

import pytest

ADDRESSES = ("192.0.2.1", "192.0.2.2")  # set aside for documentation, and here known to the two namespaces only


def static(number):
    """Return torchrun's options for host ``number`` under the static rendezvous."""
    return [f"--master-addr={ADDRESSES[0]}", "--master-port=29500", f"--node-rank={number}"]


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


@contextlib.contextmanager
def two_hosts(folder):
    """Connect two hosts whose scripts run in a folder, and remove them; skip the test where that is not possible."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command `ip` of iproute2")
    if os.geteuid() != 0:
        pytest.skip("only root can make network namespaces")
    two = Hosts(folder)
    try:
        try:
            two.connect()
        except OSError as error:
            pytest.skip(f"network namespaces with a cable between them can't be made here: {error}")
        yield two
    finally:
        two.remove()
