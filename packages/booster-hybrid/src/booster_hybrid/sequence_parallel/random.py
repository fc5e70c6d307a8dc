"""`RankStream`: random numbers that differ between the ranks that hold parts of one sequence.

These ranks draw alike outside of the layers, since they are one replica: what they compute there, they compute alike.
Inside, a dropout that drew alike would drop the same places of each part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST_SEED = 2**62
_GOLDEN = 0x9E3779B97F4A7C15


class RankStream:
    """Lets a rank draw numbers of its own for a while, from a seed that the ranks agree on by drawing it alike.

    Where nothing was drawn, the generators are left as they were.

    Args:
        rank: This rank's index among those that draw differently.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._saved: tuple[Tensor, Tensor | None] | None = None
        self._apart: tuple[Tensor, Tensor | None] | None = None
        self._num_alike, self._has_drawn_alike = 0, False

    def enter(self, device: torch.device) -> None:
        """Draw from the rank's own stream from now on.

        Args:
            device: Where numbers are drawn, apart from the CPU.
        """
        before = _states(device)
        seed = int(torch.randint(_LARGEST_SEED, ()))
        self._saved, self._after_draw, self._device = before, _states(device), device
        self._seed, self._num_alike, self._has_drawn_alike, self._apart = seed, 0, False, None
        _reseed(seed ^ (self._rank * _GOLDEN % _LARGEST_SEED), device)
        self._seeded = _states(device)

    def draw_alike(self) -> None:
        """Draw as the other ranks do until `draw_apart`, inside of `enter` and `leave`: they compute the same there."""
        if self._saved is None:
            return
        self._apart, self._num_alike = _states(self._device), self._num_alike + 1
        _reseed((self._seed + self._num_alike * _GOLDEN) % _LARGEST_SEED, self._device)
        self._seeded_alike = _states(self._device)

    def draw_apart(self) -> None:
        """Draw from the rank's own stream again."""
        if self._apart is None:
            return
        self._has_drawn_alike = self._has_drawn_alike or not _are_equal(_states(self._device), self._seeded_alike)
        _restore(self._apart, self._device)
        self._apart = None

    def leave(self) -> None:
        """Draw from where the ranks draw alike again; without effect where `enter` was not called."""
        if self._saved is None:
            return
        is_unused = not self._has_drawn_alike and _are_equal(_states(self._device), self._seeded)
        _restore(self._saved if is_unused else self._after_draw, self._device)
        self._saved = None


def _states(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _generator(device: torch.device | None) -> torch.Generator:
    if device is None:
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def _reseed(seed: int, device: torch.device) -> None:
    _generator(None).manual_seed(seed)
    if device.type == "cuda":
        _generator(device).manual_seed(seed)


def _restore(states: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1], device)


def _are_equal(states: tuple[Tensor, Tensor | None], others: tuple[Tensor, Tensor | None]) -> bool:
    return all(
        other is None or (state is not None and torch.equal(state, other))
        for state, other in zip(states, others, strict=True)
    )
