"""Streams of random numbers, one kind for each axis that splits a model: alike on replicas, different on shards.

What all ranks of a replica compute alike must draw alike, or they diverge; what they share out must draw differently,
or dropout would drop the same elements of each part. So a `Stream` lets a rank draw apart for a while. Layers whose
sequences are split enter and leave theirs, and `SplitStreams` does so at the borders of split layers. In a pipeline
all ranks draw alike what they compute alike, and otherwise differently, by `MicrobatchStreams`. Dry runs draw what they
are told (`ConstantRandomMode`), and leave the generators of Python and numpy as they were.
"""

from __future__ import annotations

import contextlib
import random
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from booster_core.errors import ConfigError
from booster_core.ranks import digest
from booster_hybrid.torch_functions import outside_of_graphs
from booster_runtime import collectives

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from booster_hybrid.mesh import Axis, RankGroup


_HIGH = 1.0 - 2.0**-24


class ConstantRandomMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets torch draw a given value wherever it draws a single number between 0 and 1.

    Models skip layers (`layerdrop`) where such a number is below a probability, or above one.

    Args:
        value: The number.
    """

    supports_higher_order_operators = True

    def __init__(self, value: float = _HIGH) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.value = value

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do what an operation does, or return the number."""
        del types
        drawn = self.drawn(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if drawn is None else drawn

    def drawn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Return the number if an operation draws a single one, else ``None``."""
        if func is torch.ops.aten.rand.default and all(size == 1 for size in args[0]):
            # A constant, so that a fake tensor of it can be asked for its value.
            return torch.tensor(self.value, dtype=kwargs.get("dtype"), device=kwargs.get("device")).reshape(args[0])
        if func is torch.ops.aten.uniform_.default and args[0].numel() == 1:
            return args[0].fill_(self.value)  # type: ignore[no-any-return]
        return None


def host_states() -> tuple[Any, ...]:
    """Return the states of the generators of Python and, where it is loaded, of numpy, to be compared."""
    numpy = sys.modules.get("numpy")
    arrays = () if numpy is None else numpy.random.get_state()
    return random.getstate(), *(each.tobytes() if hasattr(each, "tobytes") else each for each in arrays)


@contextlib.contextmanager
def preserve_generators() -> Iterator[None]:
    """Put the generators of Python and numpy back to where they were."""
    numpy = sys.modules.get("numpy")
    host, arrays = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(host)
        if numpy is not None:
            numpy.random.set_state(arrays)


_States = tuple["Tensor", "Tensor | None"]
"""States of the generators of the host, and of a device where that is another."""
_RANGE = 2**62
"""Numbers from which streams are seeded are below this."""
_looks: list[_Look] = []
"""Forwards of which it is found out whether they draw."""
_GOLDEN = 0x9E3779B97F4A7C15
"""Weyl's increment of splitmix64, which spreads consecutive numbers over all bits."""


def mixed_seed(number: int, stream: int) -> int:
    """Return a seed of a stream, from a number: splitmix64's finaliser, in the 63 bits that a seed may have.

    Reference: Steele et al. 2014, "Fast splittable pseudorandom number generators".
    """
    mixed = (number + (stream + 1) * _GOLDEN) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) % 2**64
    return (mixed ^ (mixed >> 31)) >> 1


class Stream:
    """A rank's own stream of random numbers, next to the common one in which the ranks of its group draw alike.

    Each `enter` begins with a seed of its own, made of a number of the common stream and the rank. Streams may be
    entered inside of each other. What restores the generators at both ends, as activation checkpointing does, draws the
    same again.

    Args:
        rank: This rank's index among those that draw differently.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._outside: tuple[_States, _States] | None = None
        self._is_paused = False

    @property
    def is_current(self) -> bool:
        """Whether the generators, which others restore at will, are in this stream."""
        return self._outside is not None and torch.default_generator.initial_seed() == self._seed

    def enter(self, device: torch.device) -> None:
        """Draw from the rank's own stream from now on.

        Args:
            device: Where numbers are drawn, apart from the CPU.
        """
        with _moving_generators():
            before = _states(device)
            self._seed = mixed_seed(int(torch.randint(_RANGE, ())), self._rank + 1)
            self._outside, self._device = (before, _states(device)), device
            _reseed(self._seed, device)
            self._seeded = _states(device)

    def leave(self, *, is_counted: bool = False) -> None:
        """Draw from where the ranks draw alike again; without effect where `enter` was not called.

        Args:
            is_counted: Whether the common stream is one number further even if nothing was drawn here: others may have
                drawn.
        """
        if self._outside is not None:
            with _moving_generators():
                before, after = self._outside
                is_unused = not is_counted and _are_equal(_states(self._device), self._seeded)
                _restore(before if is_unused else after, self._device)
            self._outside = None

    def pause(self) -> None:
        """Leave until `resume`, if it was entered: the ranks compute the same there."""
        self._is_paused = self._outside is not None
        self.leave()

    def resume(self) -> None:
        """Enter again after `pause`."""
        if self._is_paused:
            self.enter(self._device)
        self._is_paused = False


class _Look:
    """Finds out whether numbers are drawn, other than by streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.was_drawn = False
        self.mark()

    def mark(self) -> None:
        """Note where the generators are."""
        self._left_at = _states(self._device)

    def note(self) -> None:
        """Note whether they are elsewhere now."""
        self.was_drawn = self.was_drawn or not _are_equal(_states(self._device), self._left_at)


@contextlib.contextmanager
def _moving_generators() -> Iterator[None]:
    """Move the generators inside without a sign of drawing."""
    for look in _looks:
        look.note()
    yield
    for look in _looks:
        look.mark()


class SplitStreams:
    """Lets a model that trains draw alike for replicated activations, and apart for split ones.

    Where nothing is drawn in the first forward of training, later ones communicate nothing. One that begins to draw
    then is right if the ranks' generators were alike before and after it; else it raises.

    Args:
        columns: The modules whose outputs are split; what they draw for their inputs, as adapters may, all have. They
            get hooks, as the others do.
        rows: The modules whose inputs are, also those that they drop some of.
        group: The tensor parallel ranks.
        device: Where the model computes.
    """

    def __init__(
        self, columns: Iterable[nn.Module], rows: Iterable[nn.Module], group: RankGroup, device: torch.device
    ) -> None:
        self._group, self._device = group, device
        self._stream = Stream(group.rank)
        self._is_undecided, self._switches = True, False
        self._before: _States | None = None
        self._look: _Look | None = None
        for module in columns:
            if _has_parts(module):  # around a linear layer; a sibling may have been before it
                module.register_forward_pre_hook(self._join)
            module.register_forward_hook(self._split)
        for module in rows:
            (module.register_forward_hook if _has_parts(module) else module.register_forward_pre_hook)(self._join)

    def draw_alike(self) -> None:
        """Note that the ranks draw alike without this, as those of a pipeline do, by `MicrobatchStreams`."""
        self._is_undecided, self._switches = False, True

    @outside_of_graphs
    def begin(self) -> None:
        """Begin a forward of training by agreeing on the common stream.

        Collective: the group, unless nothing has been drawn so far.
        """
        self._stop_looking()
        self._before = _states(self._device)
        if self._is_undecided or self._switches:
            _agree(self._group, self._device)
        if self._is_undecided:
            self._look = _Look(self._device)
            _looks.append(self._look)

    @outside_of_graphs
    def end(self) -> None:
        """End it, and find out whether anything was drawn.

        Raises:
            ConfigError: If it was for the first time, and the ranks have drawn apart what they compute alike.

        Collective: the group, where it was for the first time.
        """
        assert self._before is not None, "`begin` comes before"
        if self._look is not None:
            self._look.note()
            self._is_undecided, self._switches = False, self._look.was_drawn
            if not self._switches:
                _restore(self._before, self._device)
        elif not self._switches and not _are_equal(_states(self._device), self._before):
            self._switches = True
            _check_alike([self._before, _states(self._device)], self._group)
        self._stop_looking()

    def _stop_looking(self) -> None:
        if self._look is not None:  # also after a forward that raised
            _looks.remove(self._look)
        self._before = self._look = None

    def _split(self, module: nn.Module, *_: Any) -> None:
        # A compiled layer that draws nothing is compiled once: what it draws is first seen outside of its graphs.
        if module.training and (self._switches or (not torch.compiler.is_compiling() and self._look is not None)):
            self._enter()

    def _join(self, module: nn.Module, *_: Any) -> None:
        if module.training and (self._switches or (not torch.compiler.is_compiling() and self._look is not None)):
            self._leave()

    @outside_of_graphs
    def _enter(self) -> None:
        if not self._stream.is_current:
            self._stream.enter(self._device)

    @outside_of_graphs
    def _leave(self) -> None:
        if self._stream.is_current:
            self._stream.leave(is_counted=True)


def _has_parts(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _agree(group: RankGroup, device: torch.device) -> None:
    """Seed the common stream of all ranks by a number of the first one."""
    number = torch.randint(_RANGE, ())
    if group.rank > 0:
        number.zero_()
    number = number.to(device)
    collectives.all_reduce(number, group=group.group).wait()
    _reseed(mixed_seed(int(number), 0), device)


def _check_alike(states: Sequence[_States], group: RankGroup) -> None:
    """Raise on all ranks where their generators were not alike in a forward that drew, and was not expected to.

    Raises:
        ConfigError: If so.

    Collective: the group.
    """
    found = collectives.all_gather_object(digest([list(each) for each in states]), group.group)
    if len(set(found)) > 1:
        msg = (
            "The model has begun to draw random numbers in a forward, as for dropout, after it had drawn none in its "
            "first one in training mode. Tensor parallel ranks, which compute the same, have drawn other ones here; "
            "from the next forward on they agree. Set dropout before the first step, or call `torch.manual_seed` with "
            "one number on all of them before the step in which it begins."
        )
        raise ConfigError(msg)


class MicrobatchStreams:
    """What one microbatch draws in a pipeline: a function of the batch, the microbatch and the layer alone.

    Each layer, and each other module that some stages leave out, draws from a stream of its own, and gives the
    generators back. So what is drawn outside of them comes in one order on all stages, and layers that backward
    recomputes draw the same again. The generators are left wherever this puts them; see `kept_streams`.

    Args:
        seed: The batch's number, alike on all ranks that work on it.
        microbatch: Number of the microbatch.
        device: Where the model computes.
        host: Whether the generators of Python and numpy are treated alike, as forward draws from them.
    """

    def __init__(self, seed: int, microbatch: int, device: torch.device, *, host: bool = False) -> None:
        self._base = mixed_seed(seed, microbatch)
        self._device, self._host = device, host
        self._outer: list[tuple[_States, AbstractContextManager[None] | None]] = []

    def begin(self) -> None:
        """Begin a forward of the model."""
        self._outer.clear()
        self._seed(0)

    def begin_criterion(self) -> None:
        """Draw for the criterion."""
        self._seed(-2)

    def enter(self, number: int, *, gives_back: bool = True) -> None:
        """Draw for a module, also where backward recomputes it.

        Args:
            number: The module's, from 1 on.
            gives_back: Whether `leave` will be called.
        """
        if gives_back:
            around = preserve_generators() if self._host else None
            if around is not None:
                around.__enter__()
            self._outer.append((_states(self._device), around))
        self._seed(number)

    def leave(self) -> None:
        """Go on to draw where `enter` was called."""
        states, around = self._outer.pop()
        _restore(states, self._device)
        if around is not None:
            around.__exit__(None, None, None)

    def _seed(self, number: int) -> None:
        seed = mixed_seed(self._base, number)
        _reseed(seed, self._device)
        if self._host:
            random.seed(seed)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(seed % 2**32)


@contextlib.contextmanager
def kept_streams(device: torch.device) -> Iterator[None]:
    """Put torch's generators, the CPU's and a device's, back afterwards to where they were."""
    states = _states(device)
    try:
        yield
    finally:
        _restore(states, device)


def next_seed() -> int:
    """Return a number of the common stream, from which a batch's streams are made."""
    return int(torch.randint(_RANGE, ()))


@contextlib.contextmanager
def drawing_alike(replica: Axis, device: torch.device) -> Iterator[None]:
    """Draw the random numbers of a replica's first rank inside; afterwards the others go on with their own.

    Collective: the replica.
    """
    if replica.size == 1:
        yield
        return
    own = _states(device)
    _restore(collectives.all_gather_object(own, replica.group)[0], device)
    try:
        yield
    finally:
        if replica.index > 0:
            _restore(own, device)


def _states(device: torch.device) -> _States:
    host = torch.default_generator.get_state()
    return host, None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _reseed(seed: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def _restore(states: _States, device: torch.device) -> None:
    torch.default_generator.set_state(states[0])
    if states[1] is not None:
        torch.get_device_module(device).set_rng_state(states[1], device)


def _are_equal(states: _States, others: _States) -> bool:
    return all(
        other is None or (state is not None and torch.equal(state, other))
        for state, other in zip(states, others, strict=True)
    )
