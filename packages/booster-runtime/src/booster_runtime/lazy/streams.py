"""Random generators while recording: which draw follows which, however a script saves, restores and seeds them.

While construction is recorded nothing is drawn, so the generator would stand still and a script that saves and restores
its state, or seeds it, could not be noticed. So each recorded draw moves the real generator by one number: the
state then names the place in the recording, and a state that is no such place was set from outside.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Generator, Tensor


@dataclass(eq=False)
class Draw:
    """One recorded use of a generator.

    Args:
        stream: The generator.
        seed: The state that it starts from, where that was set from outside; ``None`` where it follows ``previous``.
        previous: The draw after which it comes.
        after: The generator's state afterwards, once it has been found out.
        is_kept: Whether ``after`` is needed later than by the next draw.
    """

    stream: Stream
    seed: Tensor | None
    previous: Draw | None
    after: Tensor | None = None
    is_kept: bool = False


class Stream:
    """The draws from one generator.

    Attributes:
        last: The last recorded draw.
        found: The state that was last set from outside: where it would be if no draw were ever done.
    """

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self.last: Draw | None = None
        self.found = generator.get_state()
        self._marker = b""
        self._places: dict[bytes, Draw] = {}

    def record(self) -> Draw:
        """Return the next draw, from wherever the generator stands now."""
        draw = self.locate()
        with _disable_current_modes():
            torch.rand((), generator=self.generator, device=self.generator.device)
        self._mark(draw)
        return draw

    def locate(self) -> Draw:
        """Return a draw that would start where the generator stands now."""
        key = _digest(self.generator)
        if key == self._marker:
            return Draw(self, None, self.last)
        if key in self._places:
            place = self._places[key]
            place.is_kept = True
            return Draw(self, None, place)
        self.found = self.generator.get_state()
        return Draw(self, self.found, None)

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was drawn or seeded since the last recorded draw."""
        return self.last is not None and _digest(self.generator) == self._marker

    def move_on(self) -> None:
        """Let an operation that has just drawn for real be the last draw."""
        self._mark(Draw(self, None, None, after=self.generator.get_state(), is_kept=True))

    def _mark(self, draw: Draw) -> None:
        self._marker = _digest(self.generator)
        self._places[self._marker] = self.last = draw


class Streams:
    """The generators that a recording draws from."""

    def __init__(self) -> None:
        # By the address of the generator: each operation sees a Python object of its own around it.
        self._by_address: dict[int, Stream] = {}

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._by_address.values())

    def of(self, generator: Generator | None, device: torch.device) -> Stream:
        """Return the stream of a generator, or of a device's own where none is named."""
        generator = default_generator(device) if generator is None else generator
        address: int = generator._cdata  # type: ignore[attr-defined]  # noqa: SLF001 - what identifies a generator
        if address not in self._by_address:
            self._by_address[address] = Stream(generator)
        return self._by_address[address]


def _digest(generator: Generator) -> bytes:
    return hashlib.blake2b(generator.get_state().numpy().tobytes(), digest_size=16).digest()


def default_generator(device: torch.device) -> Generator:
    """Return the generator that torch uses on a device when none is named."""
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        generator: Generator = torch.cuda.default_generators[index]
        return generator
    return torch.default_generator
