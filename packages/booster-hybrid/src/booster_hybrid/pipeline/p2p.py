"""Sending activations and their gradients between the ranks of a pipeline, whatever their shapes.

Each message is a header that says which tensors follow, with their shapes, and the tensors. Messages between two ranks
arrive in the order in which they were sent, which both know from the schedule; so a rank asks for them in that order,
one ahead of what it needs, and nothing has to be labelled. Each direction has a process group of its own: on devices a
group works off its messages one by one, and two ranks that send to each other through one would wait for each other.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

_MOST_DIMS = 8
_FIELDS = 4 + _MOST_DIMS
"""Header entries for each tensor: present, differentiable, dtype, number of dimensions, sizes."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)


class Link:
    """Messages between this rank and the others of its pipeline.

    Args:
        names: Names of all tensors that are ever sent, in an order that the ranks agree on.
        ranks: The pipeline's ranks, as ranks of the world.
        index: This rank's position among them.
        upward: Process group of messages to ranks of a higher position.
        downward: Process group of messages to ranks of a lower position.
        device: Where tensors lie.
    """

    def __init__(
        self,
        names: Sequence[str],
        ranks: Sequence[int],
        index: int,
        upward: ProcessGroup,
        downward: ProcessGroup,
        device: torch.device,
    ) -> None:
        self._names, self._ranks, self._index, self._device = list(names), ranks, index, device
        self._upward, self._downward = upward, downward
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._headers: dict[int, deque[tuple[Any, Tensor]]] = {}

    def send(self, tensors: Mapping[str, Tensor], to: int) -> None:
        """Start sending tensors; they must not be changed before `finish`.

        Args:
            tensors: By name; of each, whether it requires a gradient is told as well.
            to: Position of the receiver.

        Collective: the receiver must `receive`.
        """
        header = torch.zeros(len(self._names), _FIELDS, dtype=torch.int64)
        for row, name in zip(header, self._names, strict=True):
            tensor = tensors.get(name)
            if tensor is not None:
                row[0], row[1], row[2], row[3] = 1, tensor.requires_grad, _DTYPES.index(tensor.dtype), tensor.dim()
                row[4 : 4 + tensor.dim()] = torch.tensor(tensor.shape)
        self._start(header.to(self._device), to)
        for name in self._names:
            if name in tensors and tensors[name].numel():
                self._start(tensors[name].detach().contiguous(), to)

    def expect(self, sender: int) -> None:
        """Ask for the header of the next message from a rank, so that it travels while something else is done.

        Collective: none.
        """
        header = torch.empty(len(self._names), _FIELDS, dtype=torch.int64, device=self._device)
        work = dist.irecv(header, src=self._ranks[sender], group=self._group(sender, self._index))
        self._headers.setdefault(sender, deque()).append((work, header))

    def receive(self, sender: int) -> dict[str, Tensor]:
        """Return the next message from a rank; differentiable tensors come as leaves that require a gradient.

        Collective: the sender must `send`.
        """
        if not self._headers.get(sender):
            self.expect(sender)
        work, header = self._headers[sender].popleft()
        work.wait()
        tensors: dict[str, tuple[Tensor, bool]] = {}
        works: list[Any] = []
        for name, (is_present, is_differentiable, dtype, num_dims, *sizes) in zip(
            self._names, header.tolist(), strict=True
        ):
            if is_present:
                tensor = torch.empty(sizes[:num_dims], dtype=_DTYPES[dtype], device=self._device)
                if tensor.numel():
                    group = self._group(sender, self._index)
                    works.append(dist.irecv(tensor, src=self._ranks[sender], group=group))
                tensors[name] = (tensor, bool(is_differentiable))
        for each in works:
            each.wait()
        return {name: tensor.requires_grad_(needs) for name, (tensor, needs) in tensors.items()}

    def finish(self) -> None:
        """Return once everything that was sent has left.

        Collective: none.
        """
        while self._sent:
            work, _ = self._sent.popleft()
            work.wait()

    def _start(self, tensor: Tensor, to: int) -> None:
        group = self._group(self._index, to)
        self._sent.append((dist.isend(tensor, dst=self._ranks[to], group=group), tensor))

    def _group(self, sender: int, receiver: int) -> ProcessGroup:
        return self._upward if sender < receiver else self._downward
