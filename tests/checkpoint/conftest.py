"""Storages for tests: an S3 server for those of a file, and a third party's that a test brings itself."""

import contextlib

import pytest
from folder_storage import StorageHooks
from tests.shared.s3_server import Proxy, environment, running_s3_server

from booster_core.plugin.hooks import register_hooks, unregister_hooks


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


@pytest.fixture
def serve(tmp_path):
    """Returns a function that serves URLs of a scheme until the test ends, and returns the storage of a class."""
    with contextlib.ExitStack() as stack:

        def begin(storage_class, scheme="ours"):
            storage = storage_class(tmp_path / scheme)
            hooks = StorageHooks(storage, scheme)
            register_hooks(hooks)
            stack.callback(unregister_hooks, hooks)
            return storage

        yield begin
