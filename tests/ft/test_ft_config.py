import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from free_ports import free_port

from booster_core.errors import ConfigError, LaunchError
from booster_ft import FaultToleranceConfig, FaultTolerantPlugin
from booster_ft.liveness import groups_outside


@pytest.fixture(autouse=True)
def _no_groups(monkeypatch):
    for name in ("TORCHFT_LIGHTHOUSE", "REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS"):
        monkeypatch.delenv(name, raising=False)


def test_the_environment_fills_in_what_is_left_out(monkeypatch):
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://head:29510")
    monkeypatch.setenv("REPLICA_GROUP_ID", "2")
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "4")
    found = FaultToleranceConfig(replica_id=3)
    assert (found.place, found.lighthouse) == ((3, 4), "http://head:29510")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_replicas": 0}, "`min_replicas=0` is not an integer of at least 1"),
        ({"timeout_seconds": 0}, "`timeout_seconds=0` is not a number of seconds"),
        ({"min_replicas": 2}, "more than the 1 replica group"),
        ({"num_replicas": 2}, "meet at a lighthouse, and none is named"),
        ({"replica_id": 2, "num_replicas": 2, "lighthouse": "http://a:1"}, "group 2 of 2: groups are numbered from 0"),
        ({"inner": "ft"}, "replica groups into replica groups"),
        ({"inner": "single", "inner_options": {}, "outer_optimizer": dict}, "Say how often, by `sync_every=100`"),
        ({"sync_every": 0}, "`sync_every=0` is not an integer of at least 1"),
        ({"sync_every": 2, "spares": True}, "Leave one out"),
    ],
)
def test_wrong_options_raise(options, message):
    with pytest.raises(ConfigError, match=message):
        FaultTolerantPlugin(**options)


def test_a_number_that_is_none_is_named(monkeypatch):
    monkeypatch.setenv("REPLICA_GROUP_ID", "first")
    with pytest.raises(ConfigError, match="`REPLICA_GROUP_ID` is 'first', which is not a number"):
        FaultTolerantPlugin()


def test_an_inner_plugin_is_a_plugin():
    with pytest.raises(TypeError, match="a Plugin object; got `int`"):
        FaultTolerantPlugin(inner=3)


def test_without_torchft_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchft", None)
    with pytest.raises(ConfigError, match=r"needs torchft, which can't be imported.*Linux on x86_64"):
        FaultTolerantPlugin()


@pytest.mark.skipif(sys.platform != "linux", reason="torchft has wheels for Linux alone")
def test_a_page_that_does_not_show_this_group_is_not_taken_for_one_without_others():
    from torchft.coordination import LighthouseServer

    server = LighthouseServer("[::]:0", 1)
    try:
        assert groups_outside(server.address(), "group_1", 5.0) == ["group_1"]
    finally:
        server.shutdown()
    with pytest.raises(OSError, match="refused"):
        groups_outside(f"http://127.0.0.1:{free_port()}", "group_1", 5.0)


def test_a_page_of_another_form_is_told_at_once():
    class OtherPage(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'<tr class="beat"><td>group_1:ab12</td><td>0.1 s</td></tr>')

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), OtherPage) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(LaunchError, match=rf"The lighthouse at {address} is of a torchft whose page"):
            groups_outside(address, "group_1", 5.0)
        thread.join()


@pytest.mark.skipif(sys.platform != "linux", reason="torchft has wheels for Linux alone")
def test_groups_are_started_with_their_numbers_and_the_settings_of_the_run(tmp_path):
    script = tmp_path / "train.py"
    names = ["REPLICA_GROUP_ID", "RANK", "NUM_REPLICA_GROUPS", "BOOSTER_SETTINGS"]
    script.write_text(  # one write a line: the ranks share a pipe
        f"import os, sys; line = ' '.join([*(os.environ[name] for name in {names}), *sys.argv[1:]])\n"
        "os.write(1, f'{line}\\n'.encode())"
    )
    command = [sys.executable, "-c", "from booster_core.cli import main; main()", "run", "--groups", "2"]
    command += ["--nproc", "2", "--plugin", "ft", str(script), "--lr", "1"]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120
    )
    expected = [f'{group} {rank} 2 {{"plugin": "ft"}} --lr 1' for group in range(2) for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == expected
