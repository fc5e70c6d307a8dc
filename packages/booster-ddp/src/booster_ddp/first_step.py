"""Finding out, in the first step, whether DDP has to look for unused parameters.

DDP either searches the graph of every forward for parameters that take no part in it, and says so in a warning where
there are none, or fails in the second step where there are some. A user should have to know neither: the first
synchronised step runs without DDP, its gradients are averaged here, and DDP is built with the answer.
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

    from booster_core.wrappers import ModelWrapper


class FirstStep:
    """The first synchronised step of a model under DDP.

    Args:
        model: The boosted model, whose forward runs the user's model until the step is finished.
        build: Builds DDP around the user's model, told whether it has to look for unused parameters.
        bucket_bytes: Gradients are averaged in pieces of about this size.

    Collective: every rank of the world, to start all from rank 0's values.
    """

    def __init__(
        self, model: ModelWrapper, build: Callable[[bool], DistributedDataParallel], *, bucket_bytes: int
    ) -> None:
        self._model = model
        self._build = build
        self._bucket_bytes = bucket_bytes
        self._is_accumulating = False
        _broadcast([*model.unwrap().parameters(), *model.unwrap().buffers()])

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate local gradients: they are averaged together with those of the next backward outside."""
        before, self._is_accumulating = self._is_accumulating, True
        try:
            yield
        finally:
            self._is_accumulating = before

    @property
    def is_due(self) -> bool:
        """Whether a backward outside of `no_sync` has left gradients to be averaged."""
        return not self._is_accumulating

    def finish(self) -> None:
        """Average the gradients over all ranks, and build DDP.

        A parameter that some rank did not use counts as zero there, as it does under DDP; one that no rank used keeps
        no gradient.

        Collective: every rank of the world.
        """
        trained = [parameter for parameter in self._model.unwrap().parameters() if parameter.requires_grad]
        num_users = torch.tensor([p.grad is not None for p in trained], dtype=torch.int32, device=trained[0].device)
        dist.all_reduce(num_users)
        counts = num_users.tolist()
        used = [parameter for parameter, count in zip(trained, counts, strict=True) if count]
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        _average([parameter.grad for parameter in used if parameter.grad is not None], self._bucket_bytes)
        self._model.module = self._build(min(counts) < dist.get_world_size())


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


def _average(gradients: Sequence[Tensor], bucket_bytes: int) -> None:
    """Average gradients over all ranks in place, in buckets of one dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for alike in by_dtype.values():
        bucket: list[Tensor] = []
        for gradient in alike:
            bucket.append(gradient)
            if sum(g.numel() * g.element_size() for g in bucket) >= bucket_bytes:
                _average_bucket(bucket)
                bucket = []
        _average_bucket(bucket)


def _average_bucket(bucket: Sequence[Tensor]) -> None:
    if not bucket:
        return
    flat = torch.cat([gradient.flatten() for gradient in bucket]).div_(dist.get_world_size())
    dist.all_reduce(flat)
    sizes = [gradient.numel() for gradient in bucket]
    parts: Sequence[Tensor] = flat.split(sizes)  # type: ignore[no-untyped-call]
    for gradient, part in zip(bucket, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
