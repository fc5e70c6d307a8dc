"""`Storage`: the four operations that checkpoints at URLs need, and which storage serves a URL's scheme.

A third party brings a storage for its own scheme by the hook ``storage(scheme)``. Object stores go to obstore, and
every other scheme to fsspec. ``file://`` is the local disk itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from booster_core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping


class WriteStream(Protocol):
    """A file that is being written, from front to back. Nobody sees it before `close`."""

    def write(self, values: memoryview) -> None:
        """Append bytes. The memory may change as soon as this returns."""

    def close(self) -> None:
        """Wait until everything has reached the storage, and make the file visible at once.

        It replaces an older one, which stays as it is until then, and where this fails.
        """

    def discard(self) -> None:
        """Delete what was written. Does nothing after `close`."""


@runtime_checkable
class Storage(Protocol):
    """Files at URLs of one scheme, used by all ranks and by several threads at a time.

    All files of a save are closed at its end: until then a stream should hold little memory.

    Errors are `OSError`, or `booster_core.errors.CheckpointError` if there is more to say, and are raised on every
    rank. `FileNotFoundError` says that nothing is there, and only then does a load go back to an older step;
    `PermissionError` says that it is refused, any other error that the storage gave no answer.

    More methods are used where a storage has them. ``read_whole(url)`` returns the content of a small file, and
    ``size(url)`` the size of a file; both return ``None`` where there is none. ``children(url)`` returns the names
    directly below a URL, with the sizes of files, and ``None`` for folders; without it all that is below a root is
    listed.
    """

    def list(self, url: str) -> Mapping[str, int]:
        """Return the sizes of files at and below a URL, by their path below it (``""`` for a file at the URL)."""

    def read(self, url: str, start: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes of a file from ``start`` on; a file that ends earlier is an error."""

    def open_write(self, url: str, nbytes: int) -> WriteStream:
        """Return a stream that writes a file of ``nbytes`` bytes; folders need not be made first."""

    def remove(self, url: str) -> None:
        """Remove the file at a URL, or all files below it."""


def storage_for(scheme: str) -> Storage:
    """Return the storage of a scheme: a hook's, else obstore's for S3, Google and Azure, else fsspec's.

    Raises:
        CheckpointError: If a hook returned something else, obstore, fsspec or its driver is not installed, or nobody
            knows the scheme.
    """
    from booster_core.plugin import hook_relay

    found = hook_relay().storage(scheme=scheme)
    if found is None:
        from booster_checkpoint.storage.obstore_storage import OBJECT_SCHEMES, ObjectStorage

        if scheme in OBJECT_SCHEMES:
            return ObjectStorage(scheme)
        from booster_checkpoint.storage.fsspec_storage import storage_of_driver

        return storage_of_driver(scheme)
    if not isinstance(found, Storage):
        msg = (
            f"The hook `storage` returned a `{type(found).__name__}` for '{scheme}://', which lacks some of the "
            "methods list, read, open_write, remove."
        )
        raise CheckpointError(msg)
    return found
