"""Find parameters that somebody has changed by hand, where their values are not kept.

What is written into a gathered chunk is forgotten when the chunk is released, and a released parameter has no values
to write to. Versions tell of operations in place, digests of what went through ``.data``: of all values in debugging,
else of some of them, and only during the first phases, because a model that changes its parameters does so each time.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

import torch
import xxhash

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from booster_zero.engine import Bucket

_PHASES = 12
_SAMPLES = 256


class ChangeWatch:
    """Remembers what parameters were like when Gemini last changed them, and finds those that are not.

    Args:
        names: The parameters' names, by number.
        is_thorough: Whether to read all values, and never to stop.

    Attributes:
        found: How parameters were changed, by name, since this was last emptied.
        phases_left: How many more forwards, backward passes and steps are looked at.

    Collective: none of its methods.
    """

    def __init__(self, names: Mapping[int, str], *, is_thorough: bool) -> None:
        self.found: dict[str, str] = {}
        self.phases_left: float = math.inf if is_thorough else _PHASES
        self._most_values = sys.maxsize if is_thorough else _SAMPLES
        self._names = names
        self._seen: dict[int, tuple[int, int, int]] = {}

    def take(self, chunk: Bucket) -> None:
        """Remember a chunk's parameters as they are now."""
        if not self.phases_left:
            return
        for slot, parameter in zip(chunk.plan.slots, chunk.parameters, strict=True):
            self._seen[slot.index] = _look_at(parameter, self._most_values if chunk.is_gathered else 1)

    def look(self, chunk: Bucket) -> None:
        """Compare a chunk's parameters with what was remembered, and add those that differ to `found`."""
        if not self.phases_left:
            return
        for slot, parameter in zip(chunk.plan.slots, chunk.parameters, strict=True):
            version, address, digest = _look_at(parameter, self._most_values if chunk.is_gathered else 1)
            before = self._seen.get(slot.index)
            if before is None or before == (version, address, digest):
                continue
            if address != before[1]:
                how = "was given other memory"
            else:
                how = "was changed in place" if version != before[0] else "was changed through `.data`"
            self.found.setdefault(self._names[slot.index], how)
            self._seen[slot.index] = (version, address, digest)


def _look_at(parameter: Tensor, most: int) -> tuple[int, int, int]:
    """Return a parameter's version, address, and a digest of its values.

    Args:
        parameter: The parameter; a released one has one element of memory.
        most: Read at most about this many values.
    """
    with torch._C.DisableTorchFunction(), torch.no_grad():  # noqa: SLF001 - as torch's own modes do
        values = parameter.detach()
        if most == 1 and values.numel():
            values = values.as_strided((1,), (1,))
        elif values.numel() > most:
            values = values.reshape(-1)[:: values.numel() // most]
        plain = values.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
        digest = xxhash.xxh3_64_intdigest(plain.tobytes())
        return parameter._version, parameter.data_ptr(), digest  # noqa: SLF001 - there is no public name for it
