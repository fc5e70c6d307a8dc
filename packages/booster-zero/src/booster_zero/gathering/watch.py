"""Find parameters that somebody has changed by hand, where their values are not kept.

What is written into a gathered chunk is forgotten when the chunk is released, and a released parameter has no values
to write to. Versions tell of operations in place, digests of what went through ``.data``: of all values in debugging,
else of some of them, and only during the first phases, because a model that changes its parameters does so each time.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import xxhash

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from booster_zero.engine.bucket import Bucket

_PHASES = 12
_SAMPLES = 256
_OTHER_MEMORY = "was given other memory"


class ChangeWatch:
    """Remembers what parameters were like when they were last updated, and finds those that are not.

    Args:
        names: The parameters' names, by number.
        is_thorough: Whether to read all values, of released parameters too, and never to stop.

    Attributes:
        found: How parameters were changed, by name, since this was last emptied.
        phases_left: How many more forwards, backward passes and steps are looked at.

    Collective: none of its methods.
    """

    def __init__(self, names: Mapping[int, str], *, is_thorough: bool) -> None:
        self.found: dict[str, str] = {}
        self.phases_left: float = math.inf if is_thorough else _PHASES
        self._is_thorough = is_thorough
        self._names = names
        self._seen: dict[int, _Look] = {}

    def end_phase(self) -> None:
        """Count a phase; after the last one, forget everything."""
        self.phases_left -= 1
        if not self.phases_left:
            self._seen = {}

    def take(self, chunk: Bucket) -> None:
        """Remember a chunk's parameters as they are now."""
        if not self._looks_at(chunk):
            return
        for slot, parameter in zip(chunk.plan.slots, chunk.parameters, strict=True):
            self._seen[slot.index] = self._look_at(chunk, parameter)

    def look(self, chunk: Bucket) -> None:
        """Compare a chunk's parameters with what was remembered, and add those that differ to `found`."""
        if not self._looks_at(chunk):
            return
        for slot, parameter in zip(chunk.plan.slots, chunk.parameters, strict=True):
            now, before = self._look_at(chunk, parameter), self._seen.get(slot.index)
            if before is None:
                continue
            how = now.difference(before)
            if how == _OTHER_MEMORY and not parameter.requires_grad and now.has_values_of(before):
                continue  # bitsandbytes' layers do so in each forward, and have a copy of their own anyway
            if how is not None:
                self.found.setdefault(self._names[slot.index], how)
                self._seen[slot.index] = now

    def _looks_at(self, chunk: Bucket) -> bool:
        # A released parameter that was given other memory is found when its chunk is gathered, without looking.
        return self.phases_left > 0 and (self._is_thorough or chunk.is_gathered)

    def _look_at(self, chunk: Bucket, parameter: Tensor) -> _Look:
        with torch._C.DisableTorchFunction(), torch.no_grad():  # noqa: SLF001 - as torch's own modes do
            values = parameter.detach()
            if not chunk.is_gathered and values.numel():
                values = values.as_strided((1,), (1,))  # a released parameter has one element of memory
            values = values.reshape(-1)
            if self._is_thorough:
                plain = values.view(torch.uint8).cpu().numpy()
                content: Tensor | int = xxhash.xxh3_64_intdigest(plain.tobytes())
            else:
                content = values[:: max(values.numel() // _SAMPLES, 1)].clone().view(torch.uint8)
            return _Look(parameter._version, parameter.data_ptr(), content)  # noqa: SLF001 - there is no public name


class _Look(NamedTuple):
    """What a parameter was like.

    Args:
        version: Its version, which operations in place raise.
        address: Where its memory is.
        content: A digest of its values, or some of them, on its device.
    """

    version: int
    address: int
    content: Tensor | int

    def difference(self, before: _Look) -> str | None:
        """Return how a parameter was changed since ``before``; ``None`` if it was not."""
        if self.address != before.address:
            return _OTHER_MEMORY
        if self.version != before.version:
            return "was changed in place"
        return None if self.has_values_of(before) else "was changed through `.data`"

    def has_values_of(self, before: _Look) -> bool:
        """Return whether the values that were looked at are the same."""
        if isinstance(self.content, int):
            return self.content == before.content
        assert isinstance(before.content, torch.Tensor), "a watch looks in one way"
        return torch.equal(self.content, before.content)
