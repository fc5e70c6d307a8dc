"""Hosting the user's optimizer: the same object, whose groups list this rank's pieces instead of parameters.

Schedulers hold the optimizer and its groups, so both stay what they are; only the lists under ``"params"``, and the
state's keys, change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

State = dict[str, Any]
"""What an optimizer keeps of one parameter."""


class Piece(Protocol):
    """The part of one parameter that this rank owns.

    Attributes:
        start: First element of the flattened parameter.
        stop: One past the last.
        values: What the optimizer updates: in the parameter's shape where all of it is here, else 1-D.
    """

    start: int
    stop: int
    values: nn.Parameter


class HostedOptimizer:
    """The user's optimizer, seen by the numbers of the model's parameters.

    Args:
        optimizer: The user's optimizer.
        names: Names of the model's parameters by number.

    Attributes:
        groups: For each parameter group, the numbers of its parameters in their order.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self.optimizer = optimizer
        self.groups: list[list[int]] = []
        self._names = names
        self._pieces: dict[int, Piece] = {}

    def states(self) -> dict[int, State]:
        """Return the state of each piece that has one."""
        held = self.optimizer.state
        return {index: held[piece.values] for index, piece in self._pieces.items() if piece.values in held}

    def set_state(self, index: int, state: State) -> None:
        """Replace the state of a piece; an empty one is dropped."""
        values = self._pieces[index].values
        if state:
            self.optimizer.state[values] = state
        else:
            self.optimizer.state.pop(values, None)

    def adopt(self, group_index: int, members: Sequence[int], pieces: Mapping[int, Piece]) -> None:
        """Take over a group that still lists the model's parameters, and cut the state that they have.

        Args:
            group_index: Which group; the next one after those that were taken over.
            members: The numbers of its parameters.
            pieces: What this rank owns of them.
        """
        group = self.optimizer.param_groups[group_index]
        for index, parameter in zip(members, group["params"], strict=True):
            state = self.optimizer.state.pop(parameter, None)
            piece = pieces.get(index)
            if state and piece is not None:
                self.optimizer.state[piece.values] = {
                    key: _cut(key, value, parameter.shape, piece) for key, value in state.items()
                }
        self.groups.append(list(members))
        self._pieces.update(pieces)
        self._list_pieces(group_index)

    def replace(self, pieces: Mapping[int, Piece], states: Mapping[int, State]) -> None:
        """List other pieces, with their state, after everything has been laid out anew."""
        for piece in self._pieces.values():
            self.optimizer.state.pop(piece.values, None)
        self._pieces = dict(pieces)
        for group_index in range(len(self.groups)):
            self._list_pieces(group_index)
        for index, state in states.items():
            self.set_state(index, state)

    def _list_pieces(self, group_index: int) -> None:
        group = self.optimizer.param_groups[group_index]
        held = [index for index in self.groups[group_index] if index in self._pieces]
        group["params"][:] = [self._pieces[index].values for index in held]
        if "param_names" in group:  # torch lists names beside parameters where the user gave them
            group["param_names"] = [self._names[index] for index in held]


def _cut(key: str, value: Any, shape: torch.Size, piece: Piece) -> Any:
    """Return a piece's part of a whole parameter's state; what is not elementwise stays whole."""
    if not isinstance(value, torch.Tensor):
        return value
    values = piece.values
    if not is_cut(key, value, shape):
        return value.clone()
    dtype = values.dtype if value.is_floating_point() else value.dtype
    part = value.reshape(-1)[piece.start : piece.stop].view(values.shape)
    return part.to(device=values.device, dtype=dtype, copy=True)


def is_cut(key: str, value: Tensor, shape: torch.Size) -> bool:
    """Whether a piece's state is elementwise, so that it is cut as the parameter is; a step count never is."""
    return key != "step" and value.shape == shape
