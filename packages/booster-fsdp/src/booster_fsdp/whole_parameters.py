r"""Whole parameters for optimizers that need them (Adafactor, Muon), each on one rank of a replica during a step.

Each sharded parameter has an owner among the ranks of its replica, which also keeps its state::

    rank 0  rows 0-1 --\\                   /--> rows 0-1
    rank 1  rows 2-3 ---> whole on owner: step --> rows 2-3
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from booster_runtime.sharding import local_of, step_cost

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from booster_runtime.sharding import ShardingRanks


class WholeParameters:
    """Gather and scatter parameters that an optimizer needs whole, each on one rank of a replica.

    Args:
        parameters: DTensors, or replicated.
        ranks: The ranks of a replica.
        by_matrix: Whether the optimizer updates matrices by themselves, so that work goes by their products.
        loads: What each rank of a replica has to do already; what these parameters cost is added.

    Attributes:
        wholes: What the optimizer steps on for each parameter: a tensor that has memory during a step only, or the
            parameter itself if it is replicated; ``None`` for parameters of other owners.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], ranks: ShardingRanks, loads: list[int], *, by_matrix: bool
    ) -> None:
        self._ranks = ranks
        sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
        self._owner = _owners(sharded, loads, by_matrix=by_matrix)
        self.wholes: dict[nn.Parameter, nn.Parameter | None] = {}
        self._gathered: list[nn.Parameter] = []
        for parameter in parameters:
            if parameter not in self._owner:
                self.wholes[parameter] = parameter
            elif self._owner[parameter] == ranks.shard_rank:
                values = _without_memory(parameter)
                self.wholes[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            else:
                self.wholes[parameter] = None

    def gather(self, *, all_parameters: bool = False) -> None:
        """Send the parameters that have gradients, and the gradients, to their owners.

        Args:
            all_parameters: Send all parameters, and no gradients.

        Collective: the shard group.
        """
        self._gathered = list(self._owner) if all_parameters else [p for p in self._owner if p.grad is not None]
        operations, received = [], []
        for parameter in self._gathered:
            whole = self.wholes[parameter]
            rows = [local_of(parameter)]
            if not all_parameters:
                rows.append(local_of(parameter.grad))  # type: ignore[arg-type]
            if whole is None:
                operations += [self._transfer(dist.isend, part, self._owner[parameter]) for part in rows]
                continue
            made = [part.new_empty(parameter.shape) for part in rows]
            whole.data, whole.grad = made[0], None if all_parameters else made[1]
            for tensor, own in zip(made, rows, strict=True):
                for rank, part in self._parts(parameter, tensor):
                    if rank == self._ranks.shard_rank:
                        part.copy_(own)
                    else:
                        buffer = part if part.is_contiguous() else part.new_empty(part.shape)
                        operations.append(self._transfer(dist.irecv, buffer, rank))
                        received.append((part, buffer))
        _run(operations)
        for part, buffer in received:
            if buffer is not part:
                part.copy_(buffer)

    def scatter(self) -> None:
        """Send the updated parameters back to the ranks of their rows, and free the whole parameters.

        Collective: the shard group.
        """
        operations = []
        for parameter in self._gathered:
            whole, rows = self.wholes[parameter], local_of(parameter)
            if whole is None:
                operations.append(self._transfer(dist.irecv, rows, self._owner[parameter]))
                continue
            for rank, part in self._parts(parameter, whole.data):
                if rank == self._ranks.shard_rank:
                    rows.copy_(part)
                else:
                    operations.append(self._transfer(dist.isend, part.contiguous(), rank))
        _run(operations)
        for parameter in self._gathered:
            whole = self.wholes[parameter]
            if whole is not None:
                whole.grad = None
                whole.data = _without_memory(parameter)

    def _parts(self, parameter: Any, whole: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the parts of a whole tensor with the ranks that keep them; the last ranks may have none."""
        dim = parameter.placements[-1].dim
        yield from enumerate(whole.chunk(self._ranks.shard_size, dim))

    def _transfer(self, call: Any, part: Tensor, peer: int) -> dist.P2POp | None:
        return dist.P2POp(call, part, group=self._ranks.shard_group, group_peer=peer) if part.numel() else None


def _run(operations: Sequence[dist.P2POp | None]) -> None:
    listed = [operation for operation in operations if operation is not None]
    if listed:
        for work in dist.batch_isend_irecv(listed):
            work.wait()


def _owners(parameters: Sequence[nn.Parameter], loads: list[int], *, by_matrix: bool) -> dict[nn.Parameter, int]:
    """Assign parameters to owners, balanced by cost: the largest first, to the rank with the least to do."""
    costs = [(step_cost(parameter, by_matrix=by_matrix), parameter) for parameter in parameters]
    owner = {}
    for cost, parameter in sorted(costs, key=lambda item: -item[0]):
        rank = loads.index(min(loads))
        owner[parameter] = rank
        loads[rank] += cost
    return owner


def _without_memory(parameter: nn.Parameter) -> Tensor:
    """Return a tensor of a parameter's shape, dtype and device with the memory of one element."""
    return torch.zeros((), dtype=parameter.dtype, device=local_of(parameter).device).expand(parameter.shape)
