"""Folders of ``torch.distributed.checkpoint`` at URLs: torch writes them to a local folder, which is then uploaded.

Everything else is uploaded while it is written (`booster_checkpoint.save.remote`).
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from booster_checkpoint.files.dcp import METADATA
from booster_checkpoint.save.writer import as_checkpoint_error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from booster_checkpoint.storage import RemotePath
    from booster_core.ranks import DistCoordinator

_TRANSFER_TIMEOUT_SECONDS = 24 * 3600.0
_CHUNK_BYTES = 8 << 20


@contextmanager
def staged_for(coordinator: DistCoordinator, target: RemotePath, call: str) -> Iterator[Path]:
    """Give a local folder to write to; what is there after the body is uploaded.

    Args:
        coordinator: The ranks.
        target: The folder at a URL. Files of an older one that are not replaced are removed.
        call: What the user called.

    Raises:
        CheckpointError: If the upload failed.

    Collective: every rank.
    """
    folder: Path | None = None
    try:
        with coordinator.together(call):
            if coordinator.rank == 0:
                try:
                    folder = Path(tempfile.mkdtemp(prefix="booster-"))
                except OSError as error:
                    raise as_checkpoint_error(error, Path(tempfile.gettempdir())) from error
        path = Path(coordinator.broadcast_object(folder)) / target.name
        yield path
        limit = max(coordinator.timeout_seconds, _TRANSFER_TIMEOUT_SECONDS)
        with coordinator.together(call, timeout_seconds=limit):
            if folder is not None:
                _upload(path, target)
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _upload(path: Path, target: RemotePath) -> None:
    """Upload a folder, its table last; without a table, files are no checkpoint."""
    (target / METADATA).unlink(missing_ok=True)
    old = {key for key in target.files() if key.endswith(".distcp")}
    files = sorted((entry for entry in path.rglob("*") if entry.is_file()), key=lambda entry: entry.name == METADATA)
    for entry in files:
        key = entry.relative_to(path).as_posix()
        stream = (target / key).open_write(entry.stat().st_size)
        try:
            with entry.open("rb") as content:
                while chunk := content.read(_CHUNK_BYTES):
                    stream.write(memoryview(chunk))
            stream.close()
        finally:
            stream.discard()
        old.discard(key)
    for key in old:
        (target / key).remove()
