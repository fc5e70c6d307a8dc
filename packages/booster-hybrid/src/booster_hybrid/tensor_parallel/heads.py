"""`LocalCount`: how many heads are here, for modules that find a head's width from the number of heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class LocalCount(int):
    """A number of heads here, by which a whole width is divided as by the number of all heads.

    Args:
        here: The number.
        everywhere: The number over all ranks.
    """

    everywhere: int

    def __new__(cls, here: int, everywhere: int) -> Self:
        """Return the number."""
        number = super().__new__(cls, here)
        number.everywhere = everywhere
        return number

    def __rfloordiv__(self, width: int) -> int:
        """Return the width of one head, from that of all ranks' heads."""
        return width // self.everywhere

    def __reduce__(self) -> tuple[type[LocalCount], tuple[int, int]]:
        """Return how a copy is made."""
        return LocalCount, (int(self), self.everywhere)
