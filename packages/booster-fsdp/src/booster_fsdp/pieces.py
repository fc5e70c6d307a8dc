r"""Plain tensors that the user's optimizer updates in place of DTensors: this rank's rows, or whole parameters.

torch's optimizers call DTensor's dispatcher for each operation, and some (Adafactor, Muon, Rprop) use operations that
it does not support. Elementwise optimizers update this rank's rows as plain tensors. For other optimizers, each
parameter has an owner among the ranks of its replica, which gets the whole parameter during a step::

    rank 0  rows 0-1 --\\                   /--> rows 0-1
    rank 1  rows 2-3 ---> whole on owner: step --> rows 2-3
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from booster_runtime.sharding import ParameterPiece, local_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from booster_runtime.sharding import ShardingRanks


@dataclass(eq=False)
class RowsPiece(ParameterPiece):
    """The part of one parameter that this rank's optimizer updates.

    The parameter is a DTensor, or whole on every rank. ``values`` share the memory of the rows here, except for whole
    parameters of one owner, which have memory during a step only.

    Attributes:
        is_shared: Every rank has and updates all of it.
    """

    is_shared: bool = False


def row_bounds(shape: Sequence[int], size: int) -> list[int]:
    """Return where each rank's rows begin in the flattened parameter, and where the last rows end.

    Args:
        shape: Shape of the parameter, at least one dimension.
        size: Number of ranks; the last ones may have no rows.

    Collective: none.
    """
    rows, row_numel = shape[0], 1
    for length in shape[1:]:
        row_numel *= length
    step = -(-rows // size)
    return [min(rank * step, rows) * row_numel for rank in range(size)] + [rows * row_numel]


def rows_here(index: int, parameter: nn.Parameter, ranks: ShardingRanks) -> RowsPiece | None:
    """Return this rank's rows of a parameter; ``None`` if it has none.

    Collective: none.
    """
    if not isinstance(parameter, DTensor):
        return RowsPiece(
            index=index, parameter=parameter, start=0, stop=parameter.numel(), values=parameter, is_shared=True
        )
    bounds = row_bounds(parameter.shape, ranks.shard_size)
    start, stop = bounds[ranks.shard_rank], bounds[ranks.shard_rank + 1]
    if start == stop:
        return None
    values = nn.Parameter(local_of(parameter), requires_grad=parameter.requires_grad)
    return RowsPiece(index=index, parameter=parameter, start=start, stop=stop, values=values)


def show_rows(pieces: Iterable[RowsPiece]) -> None:
    """Point the optimizer's tensors at the current memory of the rows and their gradients.

    Collective: none.
    """
    for piece in pieces:
        if piece.is_shared:
            continue
        rows = local_of(piece.parameter)
        if rows.data_ptr() != piece.values.data_ptr():
            piece.values.data = rows
        gradient = piece.parameter.grad
        piece.values.grad = None if gradient is None else local_of(gradient)


class WholeParameters:
    """Gather and scatter parameters that an optimizer needs whole, each on one rank of a replica.

    Args:
        parameters: The parameters by number; DTensors, or replicated.
        ranks: The ranks of a replica.
    """

    def __init__(self, parameters: Mapping[int, nn.Parameter], ranks: ShardingRanks) -> None:
        self._ranks = ranks
        self._parameters = {index: p for index, p in parameters.items() if isinstance(p, DTensor)}
        self._bounds = {index: row_bounds(p.shape, ranks.shard_size) for index, p in self._parameters.items()}
        self._owner = _owners({index: p.numel() for index, p in self._parameters.items()}, ranks.shard_size)
        self.pieces: dict[int, RowsPiece] = {}
        for index, parameter in parameters.items():
            if index not in self._parameters:
                shared = rows_here(index, parameter, ranks)
                if shared is not None:
                    self.pieces[index] = shared
            elif self._owner[index] == ranks.shard_rank:
                values = nn.Parameter(_without_memory(parameter), requires_grad=parameter.requires_grad)
                self.pieces[index] = RowsPiece(
                    index=index, parameter=parameter, start=0, stop=parameter.numel(), values=values
                )

    def gather(self) -> None:
        """Send the parameters that have gradients, and the gradients, to their owners.

        Collective: the shard group.
        """
        operations: list[dist.P2POp] = []
        for index, parameter in self._used():
            rows, gradient = local_of(parameter), local_of(parameter.grad)  # type: ignore[arg-type]
            if self._owner[index] != self._ranks.shard_rank:
                operations += self._transfers(dist.isend, index, {self._ranks.shard_rank: [rows, gradient]})
                continue
            values = self.pieces[index].values
            values.data = rows.new_empty(parameter.shape)
            values.grad = gradient.new_empty(parameter.shape)
            bounds, own = self._bounds[index], self._ranks.shard_rank
            for whole, part in ((values.data, rows), (values.grad, gradient)):
                whole.view(-1)[bounds[own] : bounds[own + 1]].copy_(part.flatten())
            operations += self._transfers(dist.irecv, index, self._parts(index, [values.data, values.grad]))
        _run(operations)

    def scatter(self) -> None:
        """Send the updated parameters back to the ranks of their rows, and free the whole parameters.

        Collective: the shard group.
        """
        operations: list[dist.P2POp] = []
        for index, parameter in self._used():
            rows = local_of(parameter)
            if self._owner[index] != self._ranks.shard_rank:
                operations += self._transfers(dist.irecv, index, {self._ranks.shard_rank: [rows]})
                continue
            whole = self.pieces[index].values.data.contiguous()
            bounds, own = self._bounds[index], self._ranks.shard_rank
            rows.copy_(whole.view(-1)[bounds[own] : bounds[own + 1]].view(rows.shape))
            operations += self._transfers(dist.isend, index, self._parts(index, [whole]))
        _run(operations)
        for index, parameter in self._used():
            if index in self.pieces:
                self.pieces[index].values.grad = None
                self.pieces[index].values.data = _without_memory(parameter)

    def _used(self) -> list[tuple[int, nn.Parameter]]:
        return [(index, p) for index, p in self._parameters.items() if p.grad is not None]

    def _parts(self, index: int, wholes: Sequence[Tensor]) -> dict[int, list[Tensor]]:
        bounds = self._bounds[index]
        return {
            rank: [whole.view(-1)[bounds[rank] : bounds[rank + 1]] for whole in wholes]
            for rank in range(self._ranks.shard_size)
            if rank != self._ranks.shard_rank
        }

    def _transfers(
        self, call: Callable[..., Any], index: int, parts: Mapping[int, Sequence[Tensor]]
    ) -> list[dist.P2POp]:
        """Return transfers between a parameter's owner and other ranks; ``parts`` is keyed by the rank of the rows."""
        own, owner = self._ranks.shard_rank, self._owner[index]
        return [
            dist.P2POp(call, part, group=self._ranks.shard_group, group_peer=owner if rank == own else rank)
            for rank, held in parts.items()
            for part in held
            if part.numel()
        ]


def _run(operations: list[dist.P2POp]) -> None:
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def _owners(numels: Mapping[int, int], size: int) -> dict[int, int]:
    """Assign parameters to owners, balanced by elements: the largest first, to the rank with the fewest."""
    loads = [0] * size
    owner = {}
    for index in sorted(numels, key=lambda index: (-numels[index], index)):
        rank = loads.index(min(loads))
        owner[index] = rank
        loads[rank] += numels[index]
    return owner


def _without_memory(parameter: nn.Parameter) -> Tensor:
    """Return a tensor of a parameter's shape, dtype and device with the memory of one element."""
    return torch.zeros((), dtype=parameter.dtype, device=local_of(parameter).device).expand(parameter.shape)
