"""The order in which buckets are used, recorded as it happens and expected again the next time.

A *phase* is one forward or one backward. Phases of one kind (training forward, evaluation, backward) are expected to
use buckets in the order of the last one of their kind; where one does not, the expectation is taken up again at the
next bucket that fits.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable


class Timeline:
    """What was used, and what will be.

    Attributes:
        kind: The kind of the present phase; ``None`` between phases.
    """

    def __init__(self) -> None:
        self.kind: Hashable | None = None
        self._expected: list[int] = []
        self._cursor = 0
        self._present: list[int] = []
        self._recorded: dict[Hashable, list[int]] = {}

    def begin(self, kind: Hashable) -> None:
        """Begin a phase, ending the one that may be open."""
        self.end()
        self.kind = kind
        self._expected = self._recorded.get(kind, [])
        self._cursor = 0
        self._present = []

    def end(self) -> None:
        """End the present phase and remember its order."""
        if self.kind is not None:
            self._recorded[self.kind] = self._present
        self.kind = None
        self._expected = []

    def note(self, bucket: int) -> None:
        """Note the use of a bucket, by its number; repetitions in a row are one use."""
        if self._present and self._present[-1] == bucket:
            return
        self._present.append(bucket)
        try:
            self._cursor = self._expected.index(bucket, self._cursor) + 1
        except ValueError:
            return  # not expected any more: what comes next is as likely as before

    def upcoming(self, most: int) -> list[int]:
        """Return the buckets that are expected next, each once, at most so many."""
        found: list[int] = []
        for bucket in itertools.islice(self._expected, self._cursor, None) if most else ():
            if bucket not in found:
                found.append(bucket)
                most -= 1
                if not most:
                    break
        return found

    def forget(self) -> None:
        """Drop all records, because buckets have got other numbers."""
        self.kind = None
        self._recorded = {}
        self._expected = []
        self._present = []
        self._cursor = 0
