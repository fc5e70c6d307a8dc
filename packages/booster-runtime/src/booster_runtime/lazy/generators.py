"""Random generators: which draw follows which while recording, and where each draw starts in a replay.

While construction is recorded nothing is drawn, so the generator would stand still and a script that saves and restores
its state, or seeds it, could not be noticed. So each recorded draw moves the real generator by one number: the
state then names the place in the recording, and a state that is no such place was set from outside.

A draw names the draw before it, or a state. In a replay it starts where that one ended; only where this is not known
yet, the draws before it are played, into memory that nobody keeps.
"""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Generator, Tensor


@dataclass(eq=False)
class Draw:
    """One recorded use of a generator.

    Args:
        generator: The generator.
        seed: The state that it starts from, where that was set from outside; ``None`` where it follows ``previous``.
        previous: The draw after which it comes.
        end: The state afterwards, of a draw that ran at once and is no entry of the recording.
        is_resumed: Whether the state after it was restored, so that several draws come after it.
    """

    generator: Generator
    seed: Tensor | None
    previous: Draw | None
    end: Tensor | None = None
    is_resumed: bool = False

    def origin(self) -> Tensor | None:
        """Return the state that was known before the draws that lead to this one."""
        draw = self
        while draw.previous is not None:
            draw = draw.previous
        return draw.seed if draw.end is None else draw.end


class Generators:
    """The generators that a recording draws from.

    Attributes:
        given: The first rank's seeds, for the draws whose own seeds differ.
    """

    def __init__(self) -> None:
        # By the address of the generator: each operation sees a Python object of its own around it.
        self._generators: dict[int, Generator] = {}
        self._last: dict[int, Draw] = {}
        self._places: dict[tuple[int, bytes], Draw] = {}
        self._seeded: list[Draw] = []
        self._ends: dict[Draw, Tensor] = {}
        self.given: dict[Draw, Tensor] = {}

    def next(self, generator: Generator | None, device: torch.device) -> Draw:
        """Return a draw that would start where a generator, or a device's own where none is named, stands now."""
        generator = default_generator(device) if generator is None else generator
        self._generators.setdefault(address_of(generator), generator)
        place = self._place(generator)
        return Draw(generator, generator.get_state() if place is None else None, place)

    def record(self, generator: Generator | None, device: torch.device) -> Draw:
        """Return the next draw from a generator, see `next`, and move on."""
        draw = self.next(generator, device)
        if draw.seed is not None:
            self._seeded.append(draw)
        with _disable_current_modes():
            torch.rand((), generator=draw.generator, device=draw.generator.device)
        self._mark(draw)
        return draw

    def move_on(self, generator: Generator) -> None:
        """Let an operation that has just drawn for real be the last draw."""
        self._mark(Draw(generator, None, None, end=generator.get_state()))

    def places(self) -> list[Draw]:
        """Return after which draws generators stand, without those that were used or seeded since."""
        return [place for each in self._generators.values() if (place := self._place(each)) is not None]

    def _place(self, generator: Generator) -> Draw | None:
        address = address_of(generator)
        place = self._places.get((address, _digest(generator)))
        if place is not None and place is not self._last[address]:
            place.is_resumed = True
        return place

    def _mark(self, draw: Draw) -> None:
        address = address_of(draw.generator)
        self._places[address, _digest(draw.generator)] = self._last[address] = draw

    @property
    def seeds(self) -> list[Tensor]:
        """The states that generators were found in, in the order of their use."""
        return [draw.seed for draw in self._seeded if draw.seed is not None]

    def take_seeds(self, seeds: list[Tensor]) -> None:
        """Let replays for good start from other states than this process' own, in the order of `seeds`."""
        pairs = zip(self._seeded, self.seeds, seeds, strict=True)
        self.given = {draw: seed for draw, own, seed in pairs if not torch.equal(own, seed)}

    @contextmanager
    def playback(self, play: Callable[[Draw], None], *, uses_given: bool = False) -> Iterator[Playback]:
        """Play draws in the body; generators are afterwards as they were before.

        Args:
            play: Does a draw whose values nobody keeps; the generator is where the draw starts.
            uses_given: Start from the seeds that were given.
        """
        before = [(each, each.get_state()) for each in self._generators.values()]
        is_given = uses_given and bool(self.given)
        try:
            yield Playback(play, self.given if is_given else {}, {} if is_given else self._ends)
        finally:
            for generator, state in before:
                generator.set_state(state)


class Playback:
    """The draws of one replay.

    Args:
        play: See `Generators.playback`.
        given: States to start draws from in place of those that they recorded.
        ends: The state after the last draw of each generator, and after those that several draws follow.
    """

    def __init__(self, play: Callable[[Draw], None], given: Mapping[Draw, Tensor], ends: dict[Draw, Tensor]) -> None:
        self._play, self._given, self._ends = play, given, ends

    @contextmanager
    def at(self, draw: Draw) -> Iterator[None]:
        """Do a draw in the body: its generator is where the draw starts."""
        self._go_to(draw)
        yield
        self._note(draw)

    def end_of(self, draw: Draw) -> Tensor:
        """Return the state in which a draw leaves its generator."""
        self._go_to(Draw(draw.generator, None, draw))
        return draw.generator.get_state()

    def _go_to(self, draw: Draw) -> None:
        """Bring a generator to where a draw starts, through draws that were left out so far."""
        missed: list[Draw] = []
        while (start := self._start_of(draw)) is None:
            assert draw.previous is not None, "a draw has a seed or comes after another"
            draw = draw.previous
            missed.append(draw)
        draw.generator.set_state(start)
        for each in reversed(missed):
            self._play(each)
            self._note(each)

    def _start_of(self, draw: Draw) -> Tensor | None:
        """Return the state that a draw starts from, as far as it is known."""
        if draw.previous is not None:
            return self._ends.get(draw.previous) if draw.previous.end is None else draw.previous.end
        return self._given.get(draw, draw.seed) if draw.seed is not None else None

    def _note(self, draw: Draw) -> None:
        if draw.previous is not None and not draw.previous.is_resumed:
            self._ends.pop(draw.previous, None)
        self._ends[draw] = draw.generator.get_state()


def address_of(generator: Generator) -> int:
    """Return what identifies a generator."""
    address: int = generator._cdata  # type: ignore[attr-defined]  # noqa: SLF001 - there is no public name
    return address


def _digest(generator: Generator) -> bytes:
    return hashlib.blake2b(generator.get_state().numpy().tobytes(), digest_size=16).digest()


def default_generator(device: torch.device) -> Generator:
    """Return the generator that torch uses on a device when none is named."""
    module: Any = getattr(torch, device.type, None)
    if hasattr(module, "default_generators"):
        module.init()
        index = module.current_device() if device.index is None else device.index
        generator: Generator = module.default_generators[index]
        return generator
    return torch.default_generator
