"""An S3 server on this machine (moto's), and a proxy in front of it that is slow, fails, or cuts connections."""

import contextlib
import http.client
import http.server
import importlib.util
import os
import re
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass, field

import pytest
from free_ports import free_port

_HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding", "content-length", "expect", "date", "server"}


@dataclass
class Fault:
    """What happens to requests.

    Args:
        method: As in ``"PUT"``; ``""`` for any.
        text: A part of the path and query.
        kind: A status such as ``"500"``, ``"cut request"`` (half of its body is read), ``"lost answer"`` (the server
            has done it, and the connection is cut) or ``"late"`` (its body is read 0.3 s later).
        times: How many requests it happens to.
        after: How many such requests pass before.
    """

    method: str
    text: str
    kind: str
    times: int = 1
    after: int = 0


@dataclass
class Proxy:
    """A proxy in threads of this process.

    Args:
        port: The server's.
        latency: Seconds before each answer.

    Attributes:
        url: Where it listens.
        faults: What happens to the next requests.
        requests: What it has been asked for: method, path and the ``Range`` header.
        spans: When each request began and ended, in seconds.
        most_at_once: The most requests that were under way at a time.
    """

    port: int
    latency: float = 0.0
    faults: list = field(default_factory=list)
    requests: list = field(default_factory=list)
    spans: list = field(default_factory=list)
    most_at_once: int = 0
    at_once: int = 0

    def __post_init__(self):
        self._lock = threading.Lock()
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self):
                with contextlib.suppress(ConnectionError):
                    super().handle_one_request()

            def log_message(self, *_):
                pass

            def __getattr__(self, name):
                if name.startswith("do_"):
                    return lambda: proxy.answer(self)
                raise AttributeError(name)

        class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
            daemon_threads = True
            request_queue_size = 128

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def reset(self):
        """Forget faults and requests."""
        self.latency, self.most_at_once = 0.0, 0
        self.faults, self.requests, self.spans = [], [], []

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def bytes_read(self):
        """Return how many bytes of objects have been asked for."""
        ranges = [text.removeprefix("bytes=").split("-") for method, _, text in self.requests if text]
        return sum(int(last) - int(first) + 1 for first, last in ranges)

    def in_a_row(self):
        """Return the most requests of which each began after the one before had ended."""
        count, end = 0, 0.0
        for begin, until in sorted(self.spans, key=lambda span: span[1]):
            if begin >= end:
                count, end = count + 1, until
        return count

    def uploads(self, start=""):
        """Return the keys below ``start`` of uploads that were begun and have not ended."""
        with urllib.request.urlopen(f"{self.url}/bucket?uploads") as answer:
            return [key for key in re.findall("<Key>(.*?)</Key>", answer.read().decode()) if key.startswith(start)]

    def fault_of(self, method, path, wanted):
        with self._lock:
            self.requests.append((method, path, wanted))
            for fault in self.faults:
                if fault.times > 0 and fault.method in ("", method) and fault.text in path:
                    if fault.after > 0:
                        fault.after -= 1
                        continue
                    fault.times -= 1
                    return fault.kind
        return None

    def answer(self, handler):
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        begin = time.monotonic()
        try:
            self._answer(handler)
        finally:
            with self._lock:
                self.at_once -= 1
                self.spans.append((begin, time.monotonic()))

    def _answer(self, handler):
        kind = self.fault_of(handler.command, handler.path, handler.headers.get("Range"))
        length = int(handler.headers.get("Content-Length") or 0)
        if kind == "cut request":
            handler.rfile.read(length // 2)
            cut(handler)
            return
        if kind == "late":
            time.sleep(0.3)
        body = handler.rfile.read(length)
        time.sleep(self.latency)
        is_status = kind is not None and kind.isdigit()
        if is_status:
            code = {"500": "InternalError", "503": "SlowDown", "403": "AccessDenied", "404": "NoSuchUpload"}[kind]
            content = f"<Error><Code>{code}</Code><Message>The proxy says so.</Message></Error>".encode()
            status, headers = int(kind), []
        else:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            headers = {name: value for name, value in handler.headers.items() if name.lower() not in _HOP_HEADERS}
            connection.request(handler.command, handler.path, body, headers)
            answer = connection.getresponse()
            content, status = answer.read(), answer.status
            headers = [item for item in answer.getheaders() if item[0].lower() not in _HOP_HEADERS]
            length_told = answer.getheader("Content-Length")
            connection.close()
        if kind == "lost answer":
            cut(handler)
            return
        handler.send_response(status)
        for name, value in headers:
            handler.send_header(name, value)
        told = length_told if handler.command == "HEAD" and not is_status else str(len(content))
        handler.send_header("Content-Length", told or "0")
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(content)


def cut(handler):
    """End a connection so that its other side sees an error."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    handler.close_connection = True
    handler.connection.close()


def environment(url, attempts=3):
    """Return environment variables for a process that uses the server: no credentials of anybody."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_MAX_ATTEMPTS": str(attempts),
        "NO_PROXY": "127.0.0.1",
    }


def need_server():
    """Skip a test, or a file of tests, where moto is not installed; it is imported by the server alone."""
    if importlib.util.find_spec("moto") is None:
        pytest.skip("moto, whose S3 server these tests use, is not installed", allow_module_level=True)


@contextlib.contextmanager
def running_s3_server(bucket):
    """Run a server with a bucket; give its port."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                connection.request("PUT", f"/{bucket}")
                assert connection.getresponse().status == 200
                break
            except OSError:
                assert process.poll() is None, "the server has ended"
                assert time.monotonic() < deadline, "the server does not answer"
                time.sleep(0.1)
        yield port
    finally:
        process.kill()
        process.wait()


def put_by_http(s3, key, content=b""):
    """Write an object whose key obstore refuses."""
    request = urllib.request.Request(f"{s3.url}/bucket/{key}", content, method="PUT")
    with urllib.request.urlopen(request) as answer:
        assert answer.status == 200
