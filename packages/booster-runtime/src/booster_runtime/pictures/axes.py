"""Tick marks of an axis, and the format of their numbers."""

from __future__ import annotations

import math

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def ticks(highest: float, most: int = 6) -> list[float]:
    """Return round numbers from 0 to at most the highest value.

    Args:
        highest: The end of the axis, positive.
        most: How many steps there may be.
    """
    if not highest > 0:
        return [0.0]
    rough = highest / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    return [step * index for index in range(int(highest / step + 1e-9) + 1)]


def byte_ticks(highest: float, most: int = 6) -> list[float]:
    """Return round numbers of bytes, in the unit that suits the highest value."""
    unit = _unit(highest)
    return [tick * 1024.0**unit for tick in ticks(highest / 1024.0**unit, most)]


def format_bytes(num_bytes: float) -> str:
    """Return a number of bytes as people write it, such as ``"1.5 GiB"``."""
    unit = _unit(num_bytes)
    return f"{num_bytes / 1024.0**unit:.4g} {_UNITS[unit]}"


def format_seconds(seconds: float) -> str:
    """Return a time as people write it, such as ``"20 ms"``."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if abs(seconds) * factor >= 1 or not seconds:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds * 1e6:.4g} µs"


def _unit(num_bytes: float) -> int:
    unit = 0
    while num_bytes >= 1024.0 ** (unit + 1) and unit + 1 < len(_UNITS):
        unit += 1
    return unit
