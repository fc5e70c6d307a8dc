"""Finding out, in the first step, whether DDP has to look for unused parameters.

DDP either searches the graph of every forward for parameters that take no part in it, and says so in a warning where
there are none, or fails in the second step where there are some. A user should have to know neither: the first
synchronised step runs without DDP, its gradients are averaged by `booster_ddp.averaging`, and DDP is built with the
answer.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from torch.nn.parallel import DistributedDataParallel

    from booster_core.plugin import ModelWrapper


class FirstStep:
    """The first synchronised step of a model under DDP.

    Args:
        model: The boosted model, whose forward runs the user's model until the step is finished.
        build: Builds DDP around the user's model, told whether it has to look for unused parameters.

    Attributes:
        is_accumulating: Whether this is within `no_sync`.

    Collective: every rank of the world, to start all from rank 0's values.
    """

    def __init__(self, model: ModelWrapper, build: Callable[[bool], DistributedDataParallel]) -> None:
        self._model = model
        self._build = build
        self._is_used_in_part = False
        self.is_accumulating = False
        _broadcast([*model.unwrap().parameters(), *model.unwrap().buffers()])

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate local gradients: they are averaged together with those of the next backward outside."""
        before, self.is_accumulating = self.is_accumulating, True
        try:
            yield
        finally:
            self.is_accumulating = before

    def note_users(self, counts: Sequence[int]) -> None:
        """Note how many ranks had a gradient of each parameter when gradients were averaged.

        Collective: none.
        """
        self._is_used_in_part |= any(0 < count < dist.get_world_size() for count in counts)

    def finish(self) -> None:
        """Build DDP. Not before the step: that changes parameters in place, which a graph may still need.

        Collective: every rank of the world.
        """
        trained = [parameter for parameter in self._model.unwrap().parameters() if parameter.requires_grad]
        is_unused = any(parameter.grad is None for parameter in trained)
        self._model.module = self._build(self._is_used_in_part or is_unused)


def _broadcast(tensors: Sequence[Tensor]) -> None:
    """Give every rank the values of rank 0, of any dtype and memory format."""
    pending = []
    for tensor in tensors:
        values = tensor.detach()
        if values.numel():
            dense = values.contiguous()
            # Bytes, because backends know few dtypes.
            work = dist.broadcast(dense.view(-1).view(torch.uint8), 0, async_op=True)
            pending.append((work, values, dense))
    for work, values, dense in pending:
        work.wait()
        if dense.data_ptr() != values.data_ptr():
            values.copy_(dense)
