"""Decide in the first step whether DDP has to search for unused parameters.

With ``find_unused_parameters=True``, DDP searches the graph of every forward, and warns if there are no unused
parameters; with ``False``, it fails in the second step if there are some. With ``None``, the first synchronized step
runs without DDP: `booster_ddp.averaging` averages its gradients, and DDP is then constructed with the right value.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel

from booster_ddp.names import with_users_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from booster_core.plugin import ModelWrapper
    from booster_ddp.rank_local import RankLocal


class FirstStep:
    """Run the first synchronized step of a model, and then wrap it by DDP.

    Args:
        model: The boosted model; until the step is finished, its forward runs the user's model without DDP.
        build: Wraps the user's model by DDP; called with the value for ``find_unused_parameters``.
        bucket_bytes: Size of DDP's buckets, at which compiled graphs are split.
        rank_local: Parameters and buffers that DDP ignores.
        broadcast_buffers: Start from rank 0's buffers, too.

    Attributes:
        is_accumulating: Whether `no_sync` is active.

    Collective: every rank of the world; rank 0's values are broadcast.
    """

    def __init__(
        self,
        model: ModelWrapper,
        build: Callable[[bool], DistributedDataParallel],
        *,
        bucket_bytes: int,
        rank_local: RankLocal,
        broadcast_buffers: bool,
    ) -> None:
        self._model = model
        self._build = build
        self._rank_local = rank_local
        self._is_used_in_part = False
        self.is_accumulating = False
        original = model.unwrap()
        buffers = original.buffers() if broadcast_buffers else ()
        _broadcast([tensor for tensor in (*original.parameters(), *buffers) if tensor not in rank_local])
        model.module = with_users_names(_SplitAsDDP(original, bucket_bytes))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank; the next backward outside of this context averages them."""
        before, self.is_accumulating = self.is_accumulating, True
        try:
            yield
        finally:
            self.is_accumulating = before

    def note_users(self, counts: Sequence[int]) -> None:
        """Record how many ranks had a gradient of each parameter when gradients were averaged."""
        self._is_used_in_part |= any(0 < count < dist.get_world_size() for count in counts)

    def finish(self) -> None:
        """Wrap the model by DDP. Called after the step: DDP changes parameters in place, which a graph may still need.

        Collective: every rank of the world.
        """
        is_unused = any(
            parameter.grad is None
            for parameter in self._model.unwrap().parameters()
            if parameter.requires_grad and parameter not in self._rank_local
        )
        self._model.module = self._build(self._is_used_in_part or is_unused)


class _SplitAsDDP(nn.Module):
    """Run a model so that graphs which are compiled now are split as under DDP.

    ``torch.compile`` splits a graph at the boundaries of DDP's buckets, so that reduction overlaps backward, where the
    graph is traced inside of DDP's forward. Graphs that the first step traces are used in all later ones.
    """

    def __init__(self, module: nn.Module, bucket_bytes_cap: int) -> None:
        super().__init__()
        self.module = module
        self.bucket_bytes_cap = bucket_bytes_cap  # all that the compiler reads of the active DDP module

    @_disable_dynamo(recursive=False)  # the public one imports the compiler at once
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # torch has no public way to set the active DDP module.
        with DistributedDataParallel._inside_ddp_forward(cast("Any", self)):  # noqa: SLF001
            return self.module(*args, **kwargs)


def _broadcast(tensors: Sequence[Tensor]) -> None:
    """Broadcast rank 0's values of tensors of any dtype and memory format."""
    pending = []
    for tensor in tensors:
        values = tensor.detach()
        if values.numel():
            dense = values.contiguous()
            # As bytes: backends support few dtypes.
            work = dist.broadcast(dense.view(-1).view(torch.uint8), 0, async_op=True)
            pending.append((work, values, dense))
    for work, values, dense in pending:
        work.wait()
        if dense.data_ptr() != values.data_ptr():
            values.copy_(dense)
