"""Which kind of failure an exception of a storage's driver is."""

import asyncio
import errno
from types import SimpleNamespace

import pytest

from booster_checkpoint.storage.failures import failure_of, storage_errors
from booster_core.errors import (
    CheckpointAbsentError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointUnreadableError,
    ConfigError,
    StorageUnreachableError,
)

ABSENT, REFUSED, SILENT, OTHER = (
    CheckpointAbsentError,
    CheckpointUnreadableError,
    StorageUnreachableError,
    CheckpointError,
)


def obstore_error(name, text):
    exceptions = pytest.importorskip("obstore.exceptions", reason="needs the errors of obstore")
    return getattr(exceptions, name)(f"{text}\n\nDebug source:\nGeneric {{\n    secret of developers\n}}")


S3_403 = (
    "Error performing GET http://s3/b?list-type=2 in 1ms - Server returned non-2xx status code: 403 Forbidden: <Error/>"
)
S3_500 = (
    "Generic S3 error: Error performing PUT http://s3/b in 1ms, after 3 retries, max_retries: 3 - Server returned "
    "non-2xx status code: 500 Internal Server Error: <Error/>"
)


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("PermissionDeniedError", "lacked the necessary privileges", REFUSED),
        ("UnauthenticatedError", "lacked valid authentication credentials", REFUSED),
        ("GenericError", S3_403, REFUSED),
        ("GenericError", "Error performing PUT http://169.254.169.254/latest/api/token in 1ms", REFUSED),
        ("GenericError", S3_500, SILENT),
        ("GenericError", "HTTP error: error sending request", SILENT),
        ("GenericError", "status code: 404 Not Found: <Error><Code>NoSuchBucket</Code></Error>", ABSENT),
        ("GenericError", "Received redirect without LOCATION, this normally indicates an incorrect region", REFUSED),
        ("GenericError", "status code: 400 Bad Request: <Error><Code>EntityTooSmall</Code></Error>", OTHER),
        ("InvalidPathError", "contained empty path segment", OTHER),
    ],
)
@pytest.mark.parametrize("verb", ["read", "written"])
def test_obstore(name, text, kind, verb):
    error = failure_of(obstore_error(name, text), "s3://b/run", verb)
    assert type(error) is kind
    assert "secret" not in str(error)
    assert str(error).startswith(f"'s3://b/run' could not be {verb}: ")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PermissionError("Access Denied"), REFUSED),
        (OSError(S3_403), REFUSED),
        (OSError(S3_500), SILENT),
        (OSError(errno.EIO, "An internal error"), SILENT),
        (OSError(errno.EBUSY, "Slow down"), SILENT),
        (ConnectionResetError(errno.ECONNRESET, "reset by peer"), SILENT),
        (TimeoutError(), SILENT),
        (asyncio.TimeoutError(), SILENT),
        (OSError(errno.ENOSPC, "No space left on device"), OTHER),
        (TypeError("a storage with a bug"), OTHER),
    ],
)
@pytest.mark.parametrize("verb", ["read", "written"])
def test_storages(error, kind, verb):
    assert type(failure_of(error, "hf://b/run", verb)) is kind


def test_drivers_of_fsspec():
    aiohttp = pytest.importorskip("aiohttp", reason="needs the errors of aiohttp")
    botocore = pytest.importorskip("botocore.exceptions", reason="needs the errors of botocore")
    url = "s3://b/run"
    assert type(failure_of(aiohttp.ServerDisconnectedError(), url, "read")) is SILENT
    assert type(failure_of(aiohttp.ClientPayloadError("cut"), url, "read")) is SILENT
    asked = SimpleNamespace(real_url=url)
    for status, kind in ((403, REFUSED), (404, ABSENT), (503, SILENT)):
        answer = aiohttp.ClientResponseError(asked, (), status=status, message="no")
        assert type(failure_of(answer, url, "read")) is kind
    assert type(failure_of(botocore.EndpointConnectionError(endpoint_url="x"), url, "read")) is SILENT
    assert type(failure_of(botocore.NoCredentialsError(), url, "read")) is REFUSED
    said = {"Error": {"Code": "SlowDown", "Message": "later"}, "ResponseMetadata": {"HTTPStatusCode": 503}}
    assert type(failure_of(botocore.ClientError(said, "PutObject"), url, "read")) is SILENT
    said = {"Error": {"Code": "AccessDenied", "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": 403}}
    assert type(failure_of(botocore.ClientError(said, "PutObject"), url, "read")) is REFUSED


def test_errors_of_ours_stay_as_they_are():
    for error in (CheckpointDamagedError("cut"), ConfigError("no")):
        with pytest.raises(type(error)) as found, storage_errors("s3://b/x", "read"):
            raise error
        assert found.value is error
    with pytest.raises(StorageUnreachableError), storage_errors("s3://b/x", "read"):
        raise ConnectionError
    with pytest.raises(KeyboardInterrupt), storage_errors("s3://b/x", "read"):
        raise KeyboardInterrupt
