"""A progress bar on rank 0, for what takes longer than a second."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

_PATIENCE_SECONDS = 1.0


class Progress:
    """Counts bytes, and shows a bar once it has lasted. A context manager.

    Args:
        title: What is going on.
        total_bytes: Bytes that this rank expects to count.
        is_shown: Whether this rank may show a bar.
    """

    def __init__(self, title: str, total_bytes: int, *, is_shown: bool) -> None:
        self._title = title
        self._total = total_bytes
        self._done = 0
        self._is_shown = is_shown
        self._start = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, nbytes: int) -> None:
        """Count bytes."""
        self._done += nbytes
        if self._bar is not None:
            self._bar.update(nbytes)
        elif self._is_shown and time.monotonic() - self._start > _PATIENCE_SECONDS and self._done < self._total:
            from tqdm import tqdm

            self._bar = tqdm(
                total=self._total, initial=self._done, desc=self._title, unit="B", unit_scale=True, unit_divisor=1024
            )
