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


class RankStream:
    """Lets a rank draw numbers of its own for a while, from a seed that the ranks agree on by drawing it alike.

    Where nothing was drawn, the generators are left as they were.

    Args:
        rank: This rank's index among those that are to differ.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._saved: tuple[Tensor, Tensor | None] | None = None

    def enter(self, device: torch.device) -> None:
        """Draw from the rank's own stream from now on.

        Args:
            device: Where numbers are drawn, apart from the CPU.
        """
        before = _states(device)
        seed = int(torch.randint(_LARGEST_SEED, ()))
        self._saved, self._after_draw, self._device = before, _states(device), device
        _generator(None).manual_seed(seed ^ (self._rank * 0x9E3779B97F4A7C15 % _LARGEST_SEED))
        if device.type == "cuda":
            _generator(device).manual_seed(seed ^ (self._rank * 0x9E3779B97F4A7C15 % _LARGEST_SEED))
        self._seeded = _states(device)

    def leave(self) -> None:
        """Draw from where the ranks draw alike again; without effect where `enter` was not called."""
        if self._saved is None:
            return
        is_unused = all(
            after is None or (now is not None and torch.equal(now, after))
            for now, after in zip(_states(self._device), self._seeded, strict=True)
        )
        state, device_state = self._saved if is_unused else self._after_draw
        torch.set_rng_state(state)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state, self._device)
        self._saved = None


def _states(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _generator(device: torch.device | None) -> torch.Generator:
    if device is None:
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
