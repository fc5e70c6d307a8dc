"""An S3 server for the tests of a file, and what a test asks of it."""

import pytest
from tests.shared.s3_server import Proxy, environment, running_s3_server


@pytest.fixture(scope="module")
def proxy():
    with running_s3_server("bucket") as port:
        proxy = Proxy(port)
        yield proxy
        proxy.close()


@pytest.fixture
def s3(proxy, monkeypatch):
    proxy.reset()
    for name, value in environment(proxy.url).items():
        monkeypatch.setenv(name, value)
    return proxy
