"""How much of this process' memory is in files of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os


def mapped_bytes(folder: str | os.PathLike[str]) -> int:
    """Return how many bytes of tensors of this process are in files of a folder (Linux only)."""
    prefix = f"{Path(folder).resolve()}/booster-"
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, rest = line.partition(" ")
        if prefix in rest:
            start, stop = (int(address, 16) for address in addresses.split("-"))
            total += stop - start
    return total
