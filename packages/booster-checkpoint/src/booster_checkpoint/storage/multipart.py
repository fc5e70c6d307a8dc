"""Uploads to S3 in parts, several of which travel at a time.

fsspec's own files send one part after the other, so that each waits for the network. A file becomes visible when its
parts are put together, which takes one request, however large it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from concurrent.futures import Future

PART_BYTES = 16 << 20
PARTS_IN_FLIGHT = 4
"""Memory of one upload: these parts, and the one that is being filled; 80 MiB."""
_SMALL_BYTES = 1 << 20
"""Files up to this size travel as a whole, when they become visible: one request instead of three."""
_MOST_PARTS = 10_000
"""What S3 takes."""


class MultipartStream:
    """Writes one object of S3.

    Args:
        files: An ``s3fs.S3FileSystem``.
        url: The object.
        nbytes: Its size; parts are larger than `PART_BYTES` where there would be too many.
    """

    def __init__(self, files: Any, url: str, nbytes: int) -> None:
        self._files = files
        bucket, key, _ = files.split_path(url)
        self._where = {"Bucket": bucket, "Key": key}
        self._part_bytes = max(PART_BYTES, -(-nbytes // _MOST_PARTS))
        self._part = io.BytesIO()
        self._parts: list[Future[Any]] = []
        self._upload: Future[Any] | None = None
        self._is_over = False

    def write(self, values: memoryview) -> None:
        values = values.cast("B")
        while values:
            taken = values[: self._part_bytes - self._part.tell()]
            self._part.write(taken)
            values = values[len(taken) :]
            if self._part.tell() == self._part_bytes:
                self._send()

    def finish(self) -> None:
        if self._part.tell() > (0 if self._parts else _SMALL_BYTES):
            self._send()
        for part in self._parts:
            part.result()

    def close(self) -> None:
        self.finish()
        if self._parts:
            parts = [{"PartNumber": n, "ETag": part.result()["ETag"]} for n, part in enumerate(self._parts, start=1)]
            self._start(self._call("complete_multipart_upload", MultipartUpload={"Parts": parts})).result()
        else:
            self._part.seek(0)
            self._start(self._call("put_object", Body=self._part)).result()
        self._is_over = True

    def discard(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._part = io.BytesIO()
        for part in self._parts:
            part.cancel()
        for part in self._parts:
            with contextlib.suppress(BaseException):  # CancelledError is none of Exception
                part.result()
        if self._upload is not None:
            self._start(self._call("abort_multipart_upload")).result()

    def _send(self) -> None:
        """Let the part that is full travel, once there is room for it among those that do."""
        if self._upload is None:
            self._upload = self._start(self._files._call_s3("create_multipart_upload", **self._where))  # noqa: SLF001
        if len(self._parts) >= PARTS_IN_FLIGHT:
            self._parts[-PARTS_IN_FLIGHT].result()
        number, content, self._part = len(self._parts) + 1, self._part, io.BytesIO()
        content.seek(0)
        self._parts.append(self._start(self._call("upload_part", PartNumber=number, Body=content)))

    async def _call(self, method: str, **arguments: Any) -> Any:
        """Call S3, once it has told the number of the upload."""
        if self._upload is not None:
            arguments["UploadId"] = (await asyncio.wrap_future(self._upload))["UploadId"]
        return await self._files._call_s3(method, **self._where, **arguments)  # noqa: SLF001 - fsspec's coroutine

    def _start(self, call: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Let a request go on in fsspec's thread."""
        return asyncio.run_coroutine_threadsafe(call, self._files.loop)
