"""Finds parameters that somebody has changed by hand, where their values are not kept: for debugging, as it reads all.

What is written into a gathered chunk is forgotten when the chunk is released, and a released parameter has no values
to write to. Versions tell of operations in place, digests of what went through ``.data``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import xxhash

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from booster_zero.engine import Bucket


class ChangeWatch:
    """Remembers what parameters were like when Gemini last changed them, and finds those that are not.

    Args:
        names: The parameters' names, by number.

    Attributes:
        found: How parameters were changed, by name, since this was last emptied.

    Collective: none of its methods.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self.found: dict[str, str] = {}
        self._names = names
        self._seen: dict[int, tuple[int, int, int]] = {}

    def take(self, chunk: Bucket) -> None:
        """Remember a chunk's parameters as they are now."""
        for slot, parameter in zip(chunk.plan.slots, chunk.parameters, strict=True):
            self._seen[slot.index] = _look_at(parameter, is_whole=chunk.is_gathered)

    def look(self, chunk: Bucket) -> None:
        """Compare a chunk's parameters with what was remembered, and add those that differ to `found`."""
        for slot, parameter in zip(chunk.plan.slots, chunk.parameters, strict=True):
            version, address, digest = _look_at(parameter, is_whole=chunk.is_gathered)
            before = self._seen.get(slot.index)
            if before is None or before == (version, address, digest):
                continue
            if address != before[1]:
                how = "was given other memory"
            else:
                how = "was changed in place" if version != before[0] else "was changed through `.data`"
            self.found.setdefault(self._names[slot.index], how)
            self._seen[slot.index] = (version, address, digest)


def _look_at(parameter: Tensor, *, is_whole: bool) -> tuple[int, int, int]:
    """Return a parameter's version, address, and a digest of its values; a released one has one element of memory."""
    with torch._C.DisableTorchFunction(), torch.no_grad():  # noqa: SLF001 - as torch's own modes do
        values = parameter.detach()
        if not is_whole and values.numel():
            values = values.as_strided((1,), (1,))
        plain = values.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
        digest = xxhash.xxh3_64_intdigest(plain.tobytes())
        return parameter._version, parameter.data_ptr(), digest  # noqa: SLF001 - there is no public name for it
