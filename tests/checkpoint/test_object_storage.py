"""Objects of an S3 server on this machine through obstore: what it does not do by itself, and how failures are told."""

import contextlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from unittest import mock

import pytest
from packaging.version import Version
from tests.shared.s3_server import Fault, environment, need_server, put_by_http

from booster_checkpoint.storage import obstore_storage, storage_for
from booster_checkpoint.storage.failures import storage_errors
from booster_checkpoint.storage.location import locate
from booster_core.errors import (
    CheckpointAbsentError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointUnreadableError,
    StorageUnreachableError,
)

need_server()
pytest.importorskip("obstore", reason="obstore is what reaches S3")

MIB = 1 << 20
BUCKET = "s3://bucket"


@pytest.fixture
def storage(s3):
    return storage_for("s3")


def write(storage, url, content, piece=None):
    stream = storage.open_write(url, len(content))
    for start in range(0, len(content), piece or len(content) or 1):
        stream.write(memoryview(content)[start : start + (piece or len(content))])
    stream.close()


# ---- memory


@pytest.mark.parametrize(
    ("pieces", "piece"),
    [(6, 1000), (3, MIB), (6, 3 * MIB), (3, 12 * MIB)],
    ids=["small", "one part", "several pieces a part", "several parts a piece"],
)
def test_memory_may_change_as_soon_as_write_returns(pieces, piece, s3, storage, monkeypatch):
    monkeypatch.setattr(obstore_storage, "PART_BYTES", 6 * MIB)
    s3.faults = [Fault("PUT", "", "late", 10**6)]
    url = f"{BUCKET}/reused-{piece}"
    stream = storage.open_write(url, pieces * piece)
    memory = bytearray(piece)
    for number in range(pieces):
        memory[:] = bytes([number + 1]) * piece
        stream.write(memoryview(memory))
        memory[:] = b"\xff" * piece
    memory.append(0)  # nobody holds it any more
    stream.close()
    assert storage.read_whole(url) == b"".join(bytes([number + 1]) * piece for number in range(pieces))


def test_many_files_share_the_room_for_parts_in_flight(s3, storage):
    """16 files, each of a single part, given to their streams without a wait: four of them are on their way."""
    s3.faults = [Fault("PUT", "partNumber", "late", 10**6)]
    content = os.urandom(2 * MIB)
    streams = [storage.open_write(f"{BUCKET}/room/{number}", len(content)) for number in range(16)]
    for stream in streams:
        stream.write(memoryview(content))
    parts = [path for method, path, _ in s3.requests if "partNumber" in path]
    assert len(parts) >= len(streams) - obstore_storage.PARTS_IN_FLIGHT
    assert s3.most_at_once <= obstore_storage.PARTS_IN_FLIGHT + 1  # and the beginning of another upload
    assert storage.children(f"{BUCKET}/room") == {}
    for stream in streams:
        stream.close()
    assert storage.list(f"{BUCKET}/room") == {str(number): len(content) for number in range(16)}


@pytest.mark.parametrize("nbytes", [0, 1, MIB, MIB + 1, 6 * MIB - 1, 6 * MIB, 6 * MIB + 1, 25 * MIB + 7])
def test_little_is_left_for_close(nbytes, s3, storage, monkeypatch):
    monkeypatch.setattr(obstore_storage, "PART_BYTES", 12 * MIB)
    content = os.urandom(nbytes)
    url = f"{BUCKET}/left-{nbytes}"
    stream = storage.open_write(url, nbytes)
    stream.write(memoryview(content))
    stream.write(memoryview(b""))
    assert len(stream._part) <= (MIB if nbytes <= MIB else 8)
    assert storage.size(url) is None
    stream.close()
    assert storage.read_whole(url) == content
    assert sum(method == "PUT" and "partNumber" not in path for method, path, _ in s3.requests) == (nbytes <= MIB)


# ---- forks


FORKS = f"""
import multiprocessing
from booster_checkpoint.storage import locate
from booster_core.errors import CheckpointError

def use():
    try:
        print(locate("{BUCKET}/forked").read_bytes(), flush=True)
    except CheckpointError as error:
        print(error, flush=True)

def use_in_a_fork():
    process = multiprocessing.get_context("fork").Process(target=use)
    process.start()
    process.join()
    assert process.exitcode == 0

for step in (use_in_a_fork, use, use_in_a_fork, use):
    step()
"""


def test_a_fork_of_a_process_that_has_used_it_is_refused(s3, storage, tmp_path):
    """It would hang, or end the process that it was forked from; a fork may use it first."""
    write(storage, f"{BUCKET}/forked", b"content")
    (tmp_path / "forks.py").write_text(FORKS)
    env = {**os.environ, **environment(s3.url)}
    command = [sys.executable, tmp_path / "forks.py"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    in_fork, before, refused, after = done.stdout.splitlines()
    assert in_fork == before == after == "b'content'"
    assert "was forked from one that has used such a URL" in refused
    assert "multiprocessing.get_context('spawn')" in refused


# ---- parts that fail


def write_all(stream, mebibytes):
    for _ in range(mebibytes):
        stream.write(memoryview(bytes(MIB)))
    stream.close()


@pytest.mark.parametrize(
    ("kind", "error"),
    [("403", CheckpointUnreadableError), ("500", StorageUnreachableError), ("cut request", StorageUnreachableError)],
)
@pytest.mark.parametrize("number", [1, 4])
def test_a_part_that_fails(kind, error, number, s3, storage, monkeypatch):
    """The older file stays, nothing of the upload does, and the next upload works."""
    monkeypatch.setattr(obstore_storage, "PART_BYTES", 6 * MIB)
    url = f"{BUCKET}/parts-{kind.replace(' ', '-')}-{number}"
    write(storage, url, b"older")
    s3.faults = [Fault("PUT", f"partNumber={number}&", kind, 10**6)]
    stream = locate(url).open_write(24 * MIB)
    with pytest.raises(error, match="could not be written"):
        write_all(stream, 24)
    stream.discard()
    stream.discard()
    assert storage.read_whole(url) == b"older"
    if Version(version("obstore")) >= Version("0.12"):  # 0.11, the last for Python 3.10, leaves some
        assert s3.uploads() == []
    s3.faults = []
    write(storage, url, bytes(24 * MIB), MIB)
    assert storage.size(url) == 24 * MIB
    assert obstore_storage._room._value == obstore_storage.PARTS_IN_FLIGHT  # all of the room is free again


@pytest.mark.parametrize("nbytes", [10, 8 * MIB])
def test_a_file_that_is_discarded_or_lacks_bytes_is_not_visible(nbytes, s3, storage):
    url = f"{BUCKET}/discarded-{nbytes}"
    stream = storage.open_write(url, nbytes)
    stream.write(memoryview(bytes(nbytes)))
    with pytest.raises(CheckpointError, match="1 bytes are written to a file that lacks 0"):
        stream.write(memoryview(b"1"))
    stream.discard()
    assert storage.size(url) is None
    stream = storage.open_write(url, nbytes)
    stream.write(memoryview(bytes(nbytes - 1)))
    with pytest.raises(CheckpointError, match="1 bytes of a file are missing"):
        stream.close()
    stream.discard()
    assert storage.size(url) is None
    assert s3.uploads() == []
    write(storage, url, b"whole")
    stream.discard()
    assert storage.read_whole(url) == b"whole"


def test_what_is_absent_while_it_is_written_is_no_answer(s3, storage):
    """The answer to the end of an upload is lost, and the next try finds no upload: the file may be there."""
    url = f"{BUCKET}/ended"
    s3.faults = [Fault("POST", "uploadId", "404")]
    stream = locate(url).open_write(2 * MIB)
    stream.write(memoryview(bytes(2 * MIB)))
    with pytest.raises(StorageUnreachableError, match="Whether it has been written is not known"):
        stream.close()


# ---- connections that are cut


@pytest.mark.parametrize("kind", ["cut request", "lost answer", "500"])
def test_deletes_are_tried_again(kind, s3, storage):
    base = f"{BUCKET}/deletes-{kind.replace(' ', '-')}"
    for name in "abc":
        write(storage, f"{base}/{name}", b"1")
    s3.faults = [Fault("POST", "delete", kind, 2)]
    storage.remove(base)
    assert [fault.times for fault in s3.faults] == [0]
    assert storage.list(base) == {}


# ---- ranges


def test_ranges_beyond_the_end(storage):
    url = f"{BUCKET}/ranges"
    write(storage, url, bytes(range(100)))
    target = bytearray(10)
    storage.read(url, 90, memoryview(target))
    assert target == bytes(range(90, 100))
    storage.read(url, 50, memoryview(bytearray()))
    for start in (91, 99, 100, 1000):
        with pytest.raises(CheckpointDamagedError, match="ended at byte"):
            storage.read(url, start, memoryview(target))
    with pytest.raises(FileNotFoundError):
        storage.read(f"{BUCKET}/no-ranges", 0, memoryview(target))


# ---- listings


def test_listings(storage):
    base = f"{BUCKET}/lists"
    sizes = {"step-1/a": 1, "step-1/deep/b": 2, "step-10/a": 3, "step-1.tmp": 4, "a b%20c": 5, "ü": 6, "empty": 0}
    for name, size in sizes.items():
        write(storage, f"{base}/{name}", bytes(size))
    assert storage.list(base) == sizes
    assert storage.list(f"{base}/step-1") == {"a": 1, "deep/b": 2}
    assert storage.list(f"{base}/step-1.tmp") == {"": 4}
    assert storage.list(f"{base}/ste") == {}
    assert storage.children(base) == {
        "step-1": None,
        "step-10": None,
        "step-1.tmp": 4,
        "a b%20c": 5,
        "ü": 6,
        "empty": 0,
    }
    assert storage.children(f"{base}/absent") == {}
    assert [storage.size(f"{base}/{name}") for name in ("ü", "empty", "step-1", "absent")] == [6, 0, None, None]
    storage.remove(f"{base}/step-1")
    assert sorted(storage.list(base)) == sorted(name for name in sizes if not name.startswith("step-1/"))
    storage.remove(f"{base}/ü")
    assert "ü" not in storage.list(base)


@pytest.mark.slow  # thousands of objects
def test_long_listings_and_removals(storage):
    names = [f"{number:05}" for number in range(1100)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: write(storage, f"{BUCKET}/long/{name}", b"1"), names))
    assert sorted(storage.list(f"{BUCKET}/long")) == names
    assert sorted(storage.children(f"{BUCKET}/long")) == names
    storage.remove(f"{BUCKET}/long")
    assert storage.list(f"{BUCKET}/long") == {}


def test_keys_that_obstore_refuses_hide_nothing(s3, storage):
    base = f"{BUCKET}/foreign"
    for name in ("a", "x/b", "x/y/c", "z/d"):
        write(storage, f"{base}/{name}", b"12")
    put_by_http(s3, "foreign/x/y//twice", b"123")
    assert {"a": 2, "x/b": 2, "z/d": 2}.items() <= storage.list(base).items()
    assert storage.children(base) == {"a": 2, "x": None, "z": None}
    assert storage.children(f"{base}/x") == {"b": 2, "y": None}
    storage.remove(f"{base}/z")
    assert "z/d" not in storage.list(base)


def test_markers_of_folders_are_no_files(s3, storage):
    """As consoles create them: an empty object whose key ends with "/"."""
    for key in ("marked/", "marked/full/", "marked/none/"):
        put_by_http(s3, key)
    write(storage, f"{BUCKET}/marked/full/a", b"1")
    write(storage, f"{BUCKET}/marked/empty", b"")
    assert storage.list(f"{BUCKET}/marked") == {"full/a": 1, "empty": 0}
    assert storage.list(f"{BUCKET}/marked/none") == {}
    assert storage.children(f"{BUCKET}/marked") == {"full": None, "none": None, "empty": 0}
    assert [storage.size(f"{BUCKET}/marked/{name}") for name in ("full", "none", "empty")] == [None, None, 0]
    assert locate(f"{BUCKET}/marked/none").size() is None
    assert locate(f"{BUCKET}/marked/none").children() == {}


# ---- failures


def calls(url):
    location = locate(url)
    return {
        "children": location.children,
        "size": location.size,
        "read": lambda: location.open(1).read_into(memoryview(bytearray(1)), 0),
        "read_whole": location.read_bytes,
        "write": lambda: location.write_bytes(b"1"),
        "remove": location.remove,
    }


@pytest.mark.parametrize("name", ["children", "size", "read", "read_whole", "write", "remove"])
@pytest.mark.parametrize(
    ("kind", "error"),
    [("403", CheckpointUnreadableError), ("500", StorageUnreachableError), ("lost answer", StorageUnreachableError)],
)
def test_failures_of_each_call(name, kind, error, s3, monkeypatch):
    monkeypatch.setattr(obstore_storage, "_PAUSES", (0.0,))
    url = f"{BUCKET}/failing"
    locate(url).write_bytes(b"1")
    s3.faults = [Fault(method, "", kind, 10**6) for method in ("GET", "PUT", "HEAD", "POST", "DELETE")]
    with pytest.raises(error, match=f"'{url}' could not be"), storage_errors(url, "read"):
        calls(url)[name]()
    s3.faults = []
    assert locate(url).read_bytes() == b"1"


def test_a_bucket_that_is_not_there(s3):
    url = "s3://no-such-bucket/run"
    for name in ("children", "write"):
        with pytest.raises(CheckpointAbsentError, match="Does the bucket exist"):
            calls(url)[name]()


def test_nobody_listens(s3, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    for name in ("children", "read_whole", "write"):
        with pytest.raises(StorageUnreachableError, match=r"'s3://bucket/none' could not be .*Check the network"):
            calls(f"{BUCKET}/none")[name]()


def test_no_credentials_are_an_error_that_says_so(s3, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(CheckpointUnreadableError, match="No credentials were found"):
        locate(f"{BUCKET}/x").write_bytes(b"1")


def test_profiles_are_read_where_boto_is_installed(s3, tmp_path, monkeypatch):
    pytest.importorskip("botocore", reason="it reads profiles")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text("[ours]\naws_access_key_id = someone\naws_secret_access_key = something\n")
    (tmp_path / "config").write_text(f"[profile ours]\nregion = us-east-1\nendpoint_url = {s3.url}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "ours")
    locate(f"{BUCKET}/by-profile").write_bytes(b"content")
    assert locate(f"{BUCKET}/by-profile").read_bytes() == b"content"


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_other_object_stores_ask_for_their_credentials(scheme, monkeypatch):
    """Nothing of a network is needed to see that they are given their bucket."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "someone")
    storage = storage_for(scheme)
    store, key = storage._at(f"{scheme}://bucket/run/a")
    assert type(store).__name__ == {"gs": "GCSStore", "az": "AzureStore"}[scheme]
    assert key == "run/a"


@pytest.mark.parametrize("num_kept", [0, 2, 3])
@pytest.mark.timeout(30)
def test_errors_that_are_kept_keep_no_upload_waiting(num_kept):
    """Some parts are kept, as those on their way, and what comes after them is refused."""
    kept = []
    for _ in range(2 * obstore_storage.PARTS_IN_FLIGHT):
        store = mock.MagicMock()  # which holds what it was called with
        upload = store.open_writer.return_value
        upload.write.side_effect = [None] * num_kept + [ConnectionError] * 9
        upload.closed.return_value = False
        upload.close.side_effect = upload.__exit__.side_effect = ConnectionError
        stream = obstore_storage._ObjectStream(store, None, "key", 3 * obstore_storage.PART_BYTES)
        try:
            for _ in range(3):
                stream.write(memoryview(bytes(obstore_storage.PART_BYTES)))
            stream.close()
        except ConnectionError as caught:
            kept.append(caught)
        with contextlib.suppress(ConnectionError):
            stream.discard()
    assert len(kept) == 2 * obstore_storage.PARTS_IN_FLIGHT
    assert obstore_storage._room._value == obstore_storage.PARTS_IN_FLIGHT
