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
        source: The generator.
        seed: The state that it starts from, where that was set from outside; ``None`` where it follows ``previous``.
        previous: The draw after which it comes.
        end: The state afterwards, of a draw that ran at once and is no entry of the recording.
        is_resumed: Whether the state after it was restored, so that several draws come after it.
    """

    source: RecordedGenerator
    seed: Tensor | None
    previous: Draw | None
    end: Tensor | None = None
    is_resumed: bool = False


class RecordedGenerator:
    """The draws from one generator.

    Attributes:
        found: The state that was last set from outside: where it would be if no draw were ever done.
    """

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self.found = generator.get_state()
        self._last: Draw | None = None
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
        place = self.place()
        if place is not None:
            return Draw(self, None, place)
        self.found = self.generator.get_state()
        return Draw(self, self.found, None)

    def place(self) -> Draw | None:
        """Return the draw after which the generator stands; ``None`` where its state was set to no such place."""
        place = self._places.get(_digest(self.generator))
        if place is not None and place is not self._last:
            place.is_resumed = True
        return place

    def move_on(self) -> None:
        """Let an operation that has just drawn for real be the last draw."""
        self._mark(Draw(self, None, None, end=self.generator.get_state()))

    def _mark(self, draw: Draw) -> None:
        self._places[_digest(self.generator)] = self._last = draw


class Generators:
    """The generators that a recording draws from.

    Attributes:
        given: The first rank's seeds, for the draws whose own seeds differ.
    """

    def __init__(self) -> None:
        # By the address of the generator: each operation sees a Python object of its own around it.
        self._by_address: dict[int, RecordedGenerator] = {}
        self._seeded: list[Draw] = []
        self._ends: dict[Draw, Tensor] = {}
        self.given: dict[Draw, Tensor] = {}

    def of(self, generator: Generator | None, device: torch.device) -> RecordedGenerator:
        """Return what is recorded of a generator, or of a device's own where none is named."""
        generator = default_generator(device) if generator is None else generator
        address: int = generator._cdata  # type: ignore[attr-defined]  # noqa: SLF001 - what identifies a generator
        if address not in self._by_address:
            self._by_address[address] = RecordedGenerator(generator)
        return self._by_address[address]

    def record(self, generator: Generator | None, device: torch.device) -> Draw:
        """Return the next draw from a generator, see `of`."""
        draw = self.of(generator, device).record()
        if draw.seed is not None:
            self._seeded.append(draw)
        return draw

    def places(self) -> list[Draw]:
        """Return after which draws generators stand, without those that were used or seeded since."""
        return [place for each in self._by_address.values() if (place := each.place()) is not None]

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
        before = {each: each.generator.get_state() for each in self._by_address.values()}
        is_given = uses_given and bool(self.given)
        playback = Playback(play, self.given if is_given else {}, {} if is_given else self._ends)
        try:
            yield playback
        finally:
            for each, state in before.items():
                playback.leave(each)
                each.generator.set_state(state)


class Playback:
    """Where the generators stand in one replay.

    Args:
        play: See `Generators.playback`.
        given: States to start draws from in place of those that they recorded.
        ends: The state after each draw, as far as known. States are added where a generator leaves its place.
    """

    def __init__(self, play: Callable[[Draw], None], given: Mapping[Draw, Tensor], ends: dict[Draw, Tensor]) -> None:
        self._play = play
        self._given = given
        self._ends = ends
        # The draw after which each generator stands.
        self._place: dict[RecordedGenerator, Draw] = {}

    @contextmanager
    def at(self, draw: Draw) -> Iterator[None]:
        """Do a draw in the body: its generator is where the draw starts."""
        self._go_to(draw)
        with self._drawing(draw):
            yield

    def end_of(self, draw: Draw) -> Tensor:
        """Return the state in which a draw leaves its generator."""
        self._go_to(Draw(draw.source, None, draw))
        return draw.source.generator.get_state()

    def leave(self, source: RecordedGenerator) -> None:
        """Remember where a generator stands, before its state is set."""
        place = self._place.pop(source, None)
        if place is not None and place not in self._ends:
            self._ends[place] = source.generator.get_state()

    def _go_to(self, draw: Draw) -> None:
        """Bring a generator to where a draw starts, through draws that were left out so far."""
        missed: list[Draw] = []
        while not self._is_start_known(draw):
            assert draw.previous is not None, "a draw has a seed or comes after another"
            draw = draw.previous
            missed.append(draw)
        if draw.previous is None or self._place.get(draw.source) is not draw.previous:
            self.leave(draw.source)
            draw.source.generator.set_state(self._start_of(draw))
        for each in reversed(missed):
            with self._drawing(each):
                self._play(each)

    def _is_start_known(self, draw: Draw) -> bool:
        previous = draw.previous
        if previous is None:
            return True
        return self._place.get(draw.source) is previous or previous in self._ends or previous.end is not None

    def _start_of(self, draw: Draw) -> Tensor:
        """Return the state that a draw starts from, which is known."""
        if draw.previous is not None:
            return self._ends[draw.previous] if draw.previous.end is None else draw.previous.end
        assert draw.seed is not None, "a draw has a seed or comes after another"
        return self._given.get(draw, draw.seed)

    @contextmanager
    def _drawing(self, draw: Draw) -> Iterator[None]:
        """Let the body draw from where the generator is; if it raises, nobody knows where that is afterwards."""
        place = self._place.pop(draw.source, None)
        if place is not None and place.is_resumed and place not in self._ends:
            self._ends[place] = draw.source.generator.get_state()
        yield
        self._place[draw.source] = draw


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
