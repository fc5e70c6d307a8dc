"""What an exception of a storage, or of the operating system while it writes, says of a checkpoint.

Every driver has classes of its own, and some tell a refusal or a lost connection by their text alone. This file is the
only one that knows them. What it means that the system refuses a read is in `booster_checkpoint.storage.open_file`.
"""

from __future__ import annotations

import contextlib
import errno
import re
from typing import TYPE_CHECKING

from booster_core.errors import (
    BoosterError,
    CheckpointAbsentError,
    CheckpointError,
    CheckpointUnreadableError,
    StorageUnreachableError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST_TEXT = 600
_STATUS = re.compile(r"(?:status code:?|status:|HTTP|Server Error:)\s*(\d{3})\b|\b(\d{3}) (?:Client|Server) Error")
_NO_CREDENTIALS = re.compile(
    r"169\.254\.|metadata\.google\.internal|NoCredentials|DefaultCredentials|Anonymous caller|token request"
)
_NO_BUCKET = re.compile(r"NoSuchBucket|bucket does not exist|ContainerNotFound")
_OTHER_REGION = re.compile(r"redirect without LOCATION|PermanentRedirect|AuthorizationHeaderMalformed")
_REFUSING = re.compile(r"PermissionDenied|Unauthenticated|Unauthori[sz]ed|Forbidden|Authentication|Credential")
_SILENT = re.compile(r"Timeout|Connect|Disconnect|Transport|ServiceRequest|ServiceResponse|ClientPayload|Generic")
_FULL = {errno.ENOSPC, errno.EDQUOT}
_REFUSED_STATUS = {401, 403}
_SILENT_STATUS = {408, 429}
_ABSENT_STATUS = 404
_SERVER_ERRORS = range(500, 600)


def failure_of(error: BaseException, url: str, verb: str) -> CheckpointError:
    """Return the error that a user sees for an exception of a storage's driver.

    Args:
        error: What was raised: by obstore, fsspec, one of its drivers, or a storage of a third party.
        url: What was worked on.
        verb: As in "could not be read"; ``"written"`` where a file was being written.

    Returns:
        One of three kinds: nothing is there, the storage refuses it, or it gave no answer; else a plain
        `CheckpointError`. It names the URL and, where it is known, what to do.
    """
    text = _text_of(error)
    kind, remedy = _kind_of(error, text, verb)
    return kind(f"'{url}' could not be {verb}: {text.rstrip('.')}.{remedy and ' '}{remedy}")


@contextlib.contextmanager
def storage_errors(url: str, verb: str) -> Iterator[None]:
    """Raise whatever a storage raises in the body as an error of a checkpoint.

    Args:
        url: What is worked on.
        verb: As in "could not be read"; see `failure_of`.

    Raises:
        CheckpointError: If the body raised: of the kind that `failure_of` returns.
    """
    try:
        yield
    except BoosterError:
        raise
    except Exception as error:
        raise failure_of(error, url, verb) from error


def as_checkpoint_error(error: Exception, call: str, path: object) -> Exception:
    """Return an error of the operating system as one that says what it means for a checkpoint.

    That a checkpoint cannot be read was told where it was read. This is of a save's writes, or of files of others: of
    a registered object, or of state that is offloaded to a disk.

    Args:
        error: Any exception; others are returned as they are.
        call: What the user called, and in brackets which step of it failed.
        path: The checkpoint.
    """
    if isinstance(error, BoosterError) or not isinstance(error, OSError):
        return error
    remedies = {
        errno.ENOSPC: "The disk is full: free some space, or use another one.",
        errno.EDQUOT: "The disk quota is used up: free some space, or use another disk.",
        errno.EACCES: "Permission is denied: check the folder's owner and mode.",
        errno.EPERM: "Permission is denied: check the folder's owner and mode.",
        errno.EROFS: "The file system is read-only: use another one.",
        errno.EEXIST: "A part of the path is a file, not a folder: pass another path.",
        errno.ENOTDIR: "A part of the path is a file, not a folder: pass another path.",
    }
    where = f" ('{error.filename}')" if error.filename else ""
    reason = error.strerror or str(error)
    remedy = remedies.get(error.errno or 0, "")
    failure = CheckpointError(f"{call} failed at '{path}': {reason}{where}. {remedy}".rstrip())
    failure.__cause__ = error
    return failure


def _kind_of(error: BaseException, text: str, verb: str) -> tuple[type[CheckpointError], str]:
    """Return the class of the error and the remedy, which may be empty."""
    names = " ".join(each.__name__ for each in type(error).__mro__)
    status = _status_of(error, text)
    is_absent = isinstance(error, FileNotFoundError) or status == _ABSENT_STATUS
    is_full = isinstance(error, OSError) and error.errno in _FULL
    is_silent = not is_full and (isinstance(error, OSError) or _SILENT.search(names) is not None)
    kind: type[CheckpointError] = CheckpointError
    remedy = ""
    if _NO_BUCKET.search(text):
        kind, remedy = CheckpointAbsentError, "Does the bucket exist, and is its name right?"
    elif _OTHER_REGION.search(text):
        kind, remedy = CheckpointUnreadableError, "The bucket is in another region: set AWS_REGION to it."
    elif _NO_CREDENTIALS.search(f"{names} {text}"):
        kind = CheckpointUnreadableError
        remedy = "No credentials were found: give them by the storage's environment variables or files."
    elif isinstance(error, PermissionError) or status in _REFUSED_STATUS or _REFUSING.search(names):
        kind, remedy = CheckpointUnreadableError, "Check the credentials, and what they permit."
    elif is_absent and verb == "written":
        # What is absent is the upload: an answer was lost, and the driver asked again for what had ended.
        kind, remedy = StorageUnreachableError, "Whether it has been written is not known."
    elif is_absent:
        kind = CheckpointAbsentError
    elif status in _SILENT_STATUS or status in _SERVER_ERRORS or (is_silent and status is None):
        kind, remedy = StorageUnreachableError, "Check the network and the storage, and try again."
    return kind, remedy


def _status_of(error: BaseException, text: str) -> int | None:
    """Return the HTTP status that an exception tells by an attribute or in its text."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status if isinstance(status, int) else None
    for each, name in ((error, "status"), (error, "status_code"), (response, "status_code"), (error, "code")):
        status = getattr(each, name, None)
        if isinstance(status, int):
            return status
    found = _STATUS.search(text)
    return int(found[1] or found[2]) if found else None


def _text_of(error: BaseException) -> str:
    """Return an exception's text in one line, without what is meant for the developers of its driver."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    line = " ".join(str(text).partition("\n\nDebug source")[0].split())
    return line if len(line) <= _MOST_TEXT else f"{line[:_MOST_TEXT]}..."
