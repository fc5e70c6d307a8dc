"""What a run holds and sends: bytes of live storages, by the phase that made them, and bytes of collectives."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from booster_tools.planning.timeline import Busy

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage

    from booster_tools.planning.timeline import Receive, Send, Timeline

SEND = "send"
"""The kind of traffic that goes to one rank, which need not do the same at the same time."""


@dataclass
class Traffic:
    """Calls of one kind of collective.

    Args:
        calls: How many.
        payload_bytes: Size of the whole buffers that they worked on.
        sent_bytes: What this rank sends for them by a bandwidth-optimal algorithm.
    """

    calls: int = 0
    payload_bytes: int = 0
    sent_bytes: int = 0


@dataclass
class Ledger:
    """Counts storages that are alive, collectives and floating point operations.

    Attributes:
        phase: What storages that are made now are for.
        live_bytes: Size of the storages that are alive.
        peak_bytes: The largest that was since `start_step`.
        most_bytes: The largest that ever was.
        flops: Floating point operations since `start_step`.
        traffic: Collectives since `start_step`, by kind.
        timeline: What the rank has done since `start_step`, up to the last message; see `end_step`.
    """

    phase: str = ""
    live_bytes: int = 0
    peak_bytes: int = 0
    most_bytes: int = 0
    flops: int = 0
    traffic: dict[str, Traffic] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=list, repr=False)
    _storages: dict[int, tuple[weakref.ref[UntypedStorage], int, str]] = field(default_factory=dict, repr=False)
    _unknown: set[int] = field(default_factory=set, repr=False)
    _told: Busy = field(default=Busy(0, 0), repr=False)

    def mark_unknown(self, tensor: Tensor) -> None:
        """Note that a tensor's values were not computed."""
        self._unknown.add(tensor.untyped_storage()._cdata)  # noqa: SLF001 - as in `note_storage`

    def is_unknown(self, tensor: Tensor) -> bool:
        """Return whether a tensor's values, or those of others in its memory, were not computed."""
        if not self._unknown or tensor.layout != torch.strided:
            return False
        return tensor.untyped_storage()._cdata in self._unknown  # noqa: SLF001

    def start_step(self) -> None:
        """Begin to count a step."""
        self.peak_bytes = self.live_bytes
        self.flops = 0
        self.traffic = {}
        self.timeline = []
        self._told = Busy(0, 0)

    def end_step(self) -> None:
        """Complete the timeline of a step."""
        collectives = sum(each.sent_bytes for kind, each in self.traffic.items() if kind != SEND)
        done = Busy(self.flops, collectives)
        if done != self._told:
            self.timeline.append(Busy(done.flops - self._told.flops, done.sent_bytes - self._told.sent_bytes))
            self._told = done

    def exchange(self, event: Send | Receive) -> None:
        """Note in the timeline that a message is sent or waited for."""
        self.end_step()
        self.timeline.append(event)

    def note(self, tensor: Tensor, *, is_unknown: bool = False) -> None:
        """Count the memory of a tensor, if it is new; note if its values were not computed."""
        storage = tensor.untyped_storage()
        self.note_storage(storage)
        if is_unknown:
            self._unknown.add(storage._cdata)  # noqa: SLF001 - as in `note_storage`

    def note_storage(self, storage: UntypedStorage) -> None:
        """Count a storage that is new, or has another size than before."""
        key = storage._cdata  # noqa: SLF001 - what identifies a storage without touching its memory
        size = storage.nbytes()
        known = self._storages.get(key)
        if known is not None:
            if known[1] != size:
                self._storages[key] = (known[0], size, known[2])
                self._change(size - known[1])
            return

        def forget(reference: weakref.ref[UntypedStorage]) -> None:
            del reference
            gone = self._storages.pop(key, None)
            self._unknown.discard(key)
            if gone is not None:
                self._change(-gone[1])

        self._storages[key] = (weakref.ref(storage, forget), size, self.phase)
        self._change(size)

    def live_of(self, phase: str, besides: set[int]) -> int:
        """Return the bytes of live storages that a phase made, without those of some keys."""
        return sum(size for key, (_, size, made) in self._storages.items() if made == phase and key not in besides)

    def size_of(self, key: int) -> int:
        """Return the bytes of a storage; 0 for one that was there before."""
        known = self._storages.get(key)
        return 0 if known is None else known[1]

    def communicate(self, kind: str, payload_bytes: int, sent_bytes: int) -> None:
        """Count a collective."""
        entry = self.traffic.setdefault(kind, Traffic())
        entry.calls += 1
        entry.payload_bytes += payload_bytes
        entry.sent_bytes += sent_bytes

    def _change(self, num_bytes: int) -> None:
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.most_bytes = max(self.most_bytes, self.live_bytes)
