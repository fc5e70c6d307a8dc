"""Objects of S3, with as few requests in a row as possible: each takes as long as the transfer of a few MiB.

s3fs sends three requests, one after the other, to list a place without objects, and three to remove one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from booster_checkpoint.storage.fsspec_storage import FsspecStorage
from booster_checkpoint.storage.multipart import MultipartStream

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence

    from booster_checkpoint.storage.interface import WriteStream

_MOST_DELETED = 1000
"""What S3 takes in one request."""


class S3Storage(FsspecStorage):
    """Objects that s3fs reaches.

    Args:
        files: An ``s3fs.S3FileSystem``.
    """

    @override
    def list(self, url: str) -> Mapping[str, int]:
        bucket, key, _ = self._files.split_path(url)
        return dict(self._wait(self._list(bucket, key)))

    @override
    def read_whole(self, url: str) -> bytes | None:
        try:
            return bytes(self._files.cat_file(url, max_concurrency=1))  # else it asks for the size first
        except FileNotFoundError:
            return None

    @override
    def open_write(self, url: str, nbytes: int) -> WriteStream:
        return MultipartStream(self._files, url, nbytes)

    @override
    def remove(self, url: str) -> None:
        bucket, key, _ = self._files.split_path(url)
        keys = [f"{key}/{name}" if name else key for name in self.list(url)]
        for start in range(0, len(keys), _MOST_DELETED):
            objects = [{"Key": each} for each in keys[start : start + _MOST_DELETED]]
            answer = self._wait(self._call("delete_objects", Bucket=bucket, Delete={"Objects": objects, "Quiet": True}))
            for error in answer.get("Errors", ()):
                msg = f"{error.get('Message') or error.get('Code')} ('{error.get('Key')}')"
                raise OSError(msg)

    def unfinished(self, url: str) -> Sequence[Any]:
        """Return the uploads below a URL that were begun and never ended, as by killed processes."""
        bucket, key, _ = self._files.split_path(url)
        found = self._wait(self._call("list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/"))
        return [
            {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
            for upload in found.get("Uploads", ())
        ]

    def abort(self, uploads: Sequence[Any]) -> None:
        """Delete what such uploads have brought to the storage."""

        async def abort_all() -> None:
            await asyncio.gather(*(self._call("abort_multipart_upload", **upload) for upload in uploads))

        self._wait(abort_all())

    async def _list(self, bucket: str, key: str) -> dict[str, int]:
        """Return the sizes of an object and of those below it; both are asked for at once."""
        asked = asyncio.ensure_future(self._size_of(bucket, key))
        below = await self._below(bucket, f"{key}/" if key else "")
        try:
            size = await asked
        except PermissionError:  # of who may write below, and not read
            if not below:
                raise
            size = None
        return below if size is None else {"": size, **below}

    async def _below(self, bucket: str, prefix: str) -> dict[str, int]:
        sizes: dict[str, int] = {}
        page: dict[str, Any] = {}
        while True:
            answer = await self._call("list_objects_v2", Bucket=bucket, Prefix=prefix, **page)
            for entry in answer.get("Contents", ()):
                if not entry["Key"].endswith("/"):  # what consoles create as a folder
                    sizes[entry["Key"][len(prefix) :]] = int(entry["Size"])
            if not answer.get("IsTruncated"):
                return sizes
            page = {"ContinuationToken": answer["NextContinuationToken"]}

    async def _size_of(self, bucket: str, key: str) -> int | None:
        if not key:
            return None
        try:
            return int((await self._call("head_object", Bucket=bucket, Key=key))["ContentLength"])
        except FileNotFoundError:
            return None

    async def _call(self, method: str, **arguments: Any) -> Any:
        return await self._files._call_s3(method, **arguments)  # noqa: SLF001 - fsspec's coroutine

    def _wait(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Return what a coroutine returns in fsspec's thread."""
        return asyncio.run_coroutine_threadsafe(call, self._files.loop).result()
