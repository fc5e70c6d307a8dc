"""Sending activations and their gradients between the ranks of a pipeline, whatever their shapes.

Each message is a header that says which tensors follow, with their shapes, and the tensors. Messages between two ranks
arrive in the order in which they were sent, which both know from the schedule; so a rank asks for them in that order,
one ahead of what it needs, and nothing has to be labelled. Each direction has a process group of its own: on devices a
group works off its messages one by one, and two ranks that send to each other through one would wait for each other.

A rank that has failed sends headers that say so in place of what it owes, so that nobody waits for it.
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
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.bool,
    torch.complex64,
)


class Sent:
    """A message on its way; `Link.release` lets go of it.

    Args:
        parts: What to wait for, with the tensor that it reads.
    """

    def __init__(self, parts: Sequence[tuple[Any, Tensor]]) -> None:
        self._parts: deque[tuple[Any, Tensor]] = deque(parts)

    def finish(self) -> None:
        """Return once the message has left, and keep its tensors alive no longer.

        Collective: none.
        """
        while self._parts:
            work, _ = self._parts.popleft()
            work.wait()


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
        self._sent: dict[Sent, None] = {}
        self._headers: dict[int, deque[tuple[Any, Tensor]]] = {}

    def send(self, tensors: Mapping[str, Tensor] | None, to: int) -> Sent:
        """Start sending tensors; they must not be changed before `release` or `finish`.

        Args:
            tensors: By name; of each, whether it requires a gradient is told as well. ``None`` tells that this rank
                has failed.
            to: Position of the receiver.

        Collective: the receiver must `receive`.
        """
        given = tensors or {}
        header = torch.zeros(1 + len(self._names), _FIELDS, dtype=torch.int64)
        header[0, 0] = tensors is None
        for row, name in zip(header[1:], self._names, strict=True):
            tensor = given.get(name)
            if tensor is not None:
                row[0], row[1], row[2], row[3] = 1, tensor.requires_grad, _DTYPES.index(tensor.dtype), tensor.dim()
                row[4 : 4 + tensor.dim()] = torch.tensor(tensor.shape)
        parts = [self._start(header.to(self._device), to)]
        parts += [
            self._start(given[name].detach().contiguous(), to)
            for name in self._names
            if name in given and given[name].numel()
        ]
        sent = Sent(parts)
        self._sent[sent] = None
        return sent

    def expect(self, sender: int) -> None:
        """Ask for the header of the next message from a rank, so that it travels while something else is done.

        Collective: none.
        """
        header = torch.empty(1 + len(self._names), _FIELDS, dtype=torch.int64, device=self._device)
        work = dist.irecv(header, src=self._ranks[sender], group=self._group(sender, self._index))
        self._headers.setdefault(sender, deque()).append((work, header))

    def receive(self, sender: int) -> dict[str, Tensor] | None:
        """Return the next message from a rank; differentiable tensors come as leaves that require a gradient.

        Returns:
            The tensors by name; ``None`` where the sender, or a rank that it waits for, has failed.

        Collective: the sender must `send`.
        """
        if not self._headers.get(sender):
            self.expect(sender)
        work, header = self._headers[sender].popleft()
        work.wait()
        (has_failed, *_), *rows = header.tolist()
        if has_failed:
            return None
        tensors: dict[str, tuple[Tensor, bool]] = {}
        works: list[Any] = []
        for name, (is_present, is_differentiable, dtype, num_dims, *sizes) in zip(self._names, rows, strict=True):
            if is_present:
                tensor = torch.empty(sizes[:num_dims], dtype=_DTYPES[dtype], device=self._device)
                if tensor.numel():
                    group = self._group(sender, self._index)
                    works.append(dist.irecv(tensor, src=self._ranks[sender], group=group))
                tensors[name] = (tensor, bool(is_differentiable))
        for each in works:
            each.wait()
        return {name: tensor.requires_grad_(needs) for name, (tensor, needs) in tensors.items()}

    def release(self, sent: Sent) -> None:
        """Return once a message has left, and keep its tensors alive no longer.

        Collective: none.
        """
        self._sent.pop(sent, None)
        sent.finish()

    def finish(self) -> None:
        """Return once everything that was sent has left.

        Collective: none.
        """
        for sent in [*self._sent]:
            self.release(sent)

    def _start(self, tensor: Tensor, to: int) -> tuple[Any, Tensor]:
        group = self._group(self._index, to)
        return dist.isend(tensor, dst=self._ranks[to], group=group), tensor

    def _group(self, sender: int, receiver: int) -> ProcessGroup:
        return self._upward if sender < receiver else self._downward
