"""Google Cloud Storage and Azure as a run uses them: steps, a resume, files in parts, what is given up, and removal.

Google's XML interface is that of S3, so that moto's server answers for it; Azure has an emulator of its own.
"""

import base64
import contextlib
import email.utils
import hashlib
import hmac
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request

import pytest
import torch
from free_ports import free_port
from resumable import ResumableRun as Run
from tests.shared.s3_server import Proxy, need_server, running_s3_server

from booster_checkpoint.run.checkpoint_root import open_run
from booster_checkpoint.run.manifest import verify_folder
from booster_checkpoint.storage import locate, obstore_storage

pytest.importorskip("obstore", reason="obstore is what reaches these stores")

MIB = 1 << 20
ACCOUNT, KEY = "devstoreaccount1", base64.b64encode(b"nobody's").decode()
AS_S3 = "AWS4-HMAC-SHA256 Credential=nobody/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"


def make_container(port, name):
    """Make a container by a signed request, which the emulator insists on."""
    headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    told = "".join(f"{key}:{value}\n" for key, value in headers.items())
    text = f"PUT{chr(10) * 12}{told}/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    signature = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(signature).decode()}"
    url = f"http://127.0.0.1:{port}/{ACCOUNT}/{name}?restype=container"
    with urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)) as answer:
        assert answer.status == 201


@contextlib.contextmanager
def azure(_tmp_path, monkeypatch):
    """Run Microsoft's emulator."""
    emulator = shutil.which("azurite-blob")
    if emulator is None:
        pytest.skip("Azure's emulator, a program of Node, is not on PATH: npm install -g azurite")
    port = free_port()
    options = ["--blobPort", str(port), "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
    accounts = {**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}
    process = subprocess.Popen([emulator, *options], env=accounts, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                make_container(port, "bucket")
                break
            except urllib.error.URLError:
                assert process.poll() is None, "the emulator has ended"
                assert time.monotonic() < deadline, "the emulator does not answer"
                time.sleep(0.2)
        monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def google(tmp_path, monkeypatch):
    """Run moto's server as that of another store."""
    need_server()
    from obstore.store import GCSStore

    with running_s3_server("bucket") as port:
        proxy = Proxy(port, headers={"authorization": AS_S3})
        account = {"gcs_base_url": proxy.url, "disable_oauth": True, "client_email": "", "private_key": ""}
        (tmp_path / "account.json").write_text(json.dumps({**account, "private_key_id": ""}))
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))

        def without_tls(bucket, client_options):
            return GCSStore(bucket, client_options={**client_options, "allow_http": True})

        monkeypatch.setattr("obstore.store.GCSStore", without_tls)
        yield
        proxy.close()


@pytest.fixture(params=["gs", "az"])
def bucket(request, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    obstore_storage._store.cache_clear()
    with {"gs": google, "az": azure}[request.param](tmp_path, monkeypatch):
        yield f"{request.param}://bucket"
    obstore_storage._store.cache_clear()


@pytest.mark.slow  # starts a server of each
def test_a_run_at_another_store(bucket):
    assert (locate(bucket) / "nothing").read_bytes() is None
    assert (locate(bucket) / "nothing").children() == {}
    for step in (1, 2, 3):
        run = Run(seed=8)
        run.train(step)
        run.save(f"{bucket}/run", keep_last=2)
    steps = open_run(f"{bucket}/run")
    assert (steps.steps(), steps.latest_name()) == (["step-00000002", "step-00000003"], "step-00000003")
    verify_folder(locate(bucket) / "run" / "step-00000003")
    resumed = Run(seed=1)
    assert resumed.load(f"{bucket}/run", resume=True).step == 3
    for name, tensor in run.tensors().items():
        assert torch.equal(resumed.tensors()[name], tensor), name

    content, place = os.urandom(40 * MIB), locate(bucket) / "large"
    stream, memory = place.open_write(len(content)), bytearray(MIB)
    for start in range(0, len(content), MIB):
        memory[:] = content[start : start + MIB]  # the same memory each time, as a bucket is
        stream.write(memoryview(memory))
    assert place.size() is None, "seen before it is complete"
    stream.close()
    read = bytearray(len(content) - 17)
    place.open().read_into(memoryview(read), 17)
    assert read == content[17:]

    stream = (locate(bucket) / "given-up").open_write(len(content))
    stream.write(memoryview(content)[: 33 * MIB])
    stream.discard()
    (locate(bucket) / "run").remove()
    assert {name for name, size in locate(bucket).children().items() if size is not None} == {"large"}
    assert not steps.exists()
