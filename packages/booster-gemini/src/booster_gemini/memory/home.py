"""Where the blocks of chunks live: what the engine asks of whoever places them, and the answer "all on the device".

A *block* is what a chunk keeps of one role, as one flat tensor. The engine says when it uses a block and when it has
done so; in between uses, a home may move it to another memory, or out of memory.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

from booster_runtime.collectives import Pending

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from booster_core.errors import OffloadError


class Role(enum.Enum):
    """What a block holds of a chunk: this rank's slice of something."""

    PARAM = "param"
    """Working values."""
    GRAD = "grad"
    """Gradients."""
    OPTIM = "optim"
    """Masters and the optimizer's elementwise state, as bytes."""


Key = tuple[int, Role]
"""Names a block: a number that no other chunk has, and the role."""


class Home(Protocol):
    """Keeps blocks.

    Attributes:
        moves: Whether a block may ever be elsewhere than on the device that computes. Where it may not, the engine
            spares the packing of optimizer state into blocks.

    Collective: none of its methods; ranks need not do the same.
    """

    moves: bool

    def add(self, key: Key, flat: Tensor, rebind: Callable[[Tensor | None], None]) -> None:
        """Take over a block, which is not in use then.

        Args:
            key: Its name.
            flat: Its values, 1-D.
            rebind: Called, on the training thread within another method, with the memory in which the block lies from
                then on, of the same length and format; with ``None`` when it is not in memory.
        """

    def drop(self, key: Key) -> None:
        """Forget a block altogether."""

    def fetch(self, key: Key) -> Pending:
        """Begin a use. After ``wait()`` the block stays where it can be computed with until `release`.

        Parameters and gradients are on the device then; optimizer state there or on the host. Uses are counted.
        """

    def release(self, key: Key, *, changed: bool) -> None:
        """End a use.

        Args:
            key: The block.
            changed: Whether it has been written to.
        """

    def forget(self, key: Key) -> None:
        """Say that a block's values are needed no more: the next use begins without."""

    def reserve(self, num_bytes: int) -> None:
        """Say that so much device memory is taken for what is not a block."""

    def free(self, num_bytes: int) -> None:
        """Say that reserved memory has been given back."""

    def moment(self, name: str) -> None:
        """Say what the model is doing, such as a module's name; for messages and pictures."""

    def end_step(self) -> None:
        """Say that an optimizer step has ended."""

    def problem(self) -> OffloadError | None:
        """Return what went wrong since this was last asked without harm to any values, such as a disk that is full.

        What should have moved has stayed in memory then.
        """


class DeviceHome:
    """Keeps everything where it is: on the device."""

    moves = False

    def add(self, key: Key, flat: Tensor, rebind: Callable[[Tensor | None], None]) -> None:
        """Do nothing."""

    def drop(self, key: Key) -> None:
        """Do nothing."""

    def fetch(self, key: Key) -> Pending:
        """Return at once."""
        del key
        return Pending()

    def release(self, key: Key, *, changed: bool) -> None:
        """Do nothing."""

    def forget(self, key: Key) -> None:
        """Do nothing."""

    def reserve(self, num_bytes: int) -> None:
        """Do nothing."""

    def free(self, num_bytes: int) -> None:
        """Do nothing."""

    def moment(self, name: str) -> None:
        """Do nothing."""

    def end_step(self) -> None:
        """Do nothing."""

    def problem(self) -> OffloadError | None:
        """Return ``None``."""
        return None
