"""Averages of tensors over replica groups, and the check that groups average the same things.

Both go through torchft's `Manager`, which notes an error in place of raising it: a step with an error is not committed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor
from torch.distributed import ReduceOp

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torchft import Manager

_BUCKET_BYTES = 1 << 20
"""Smaller tensors are sent together, as a copy; a larger one is sent as it is."""
_BITS = 24
"""Of each number that groups compare: sums of squares over thousands of groups stay exact."""


def average(manager: Manager, tensors: Sequence[Tensor], device: torch.device) -> None:
    """Replace tensors by their averages over the groups that take part, or by zeros if that fails.

    Args:
        manager: Of this group.
        tensors: Floating, of any shapes, dtypes, strides and devices; the same on all groups.
        device: Where groups communicate.
    """
    pending = []
    for bucket in _buckets(tensors):
        large = bucket[0] if len(bucket) == 1 and bucket[0].is_contiguous() and bucket[0].device == device else None
        flat = torch.cat([each.reshape(-1).to(device) for each in bucket]) if large is None else large
        pending.append((bucket, flat, manager.allreduce(flat)))
    for bucket, flat, work in pending:
        work.wait()
        if flat is not bucket[0]:
            for tensor, values in zip(bucket, torch.split(flat, [each.numel() for each in bucket]), strict=True):
                tensor.copy_(values.view(tensor.shape))
    if manager.errored() is not None:
        for tensor in tensors:
            tensor.zero_()


def _buckets(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Return large tensors one by one, and small ones of one dtype together."""
    buckets, small_bytes = defaultdict[Any, list[Tensor]](list), Counter[torch.dtype]()
    for index, tensor in enumerate(tensors):
        key: Any = index
        if tensor.nbytes < _BUCKET_BYTES:
            key = tensor.dtype, small_bytes[tensor.dtype] // _BUCKET_BYTES
            small_bytes[tensor.dtype] += tensor.nbytes
        buckets[key].append(tensor)
    return buckets.values()


def total(manager: Manager, numbers: Sequence[int], device: torch.device) -> list[int]:
    """Return sums of numbers over the groups that take part."""
    sums = torch.tensor(numbers, device=device)
    manager.allreduce(sums, reduce_op=ReduceOp.SUM).wait()
    return [int(each) for each in sums.tolist()]


def agree(manager: Manager, text: str, device: torch.device) -> bool:
    """Return whether all groups that take part say the same; ``True`` if nobody knows, since communication failed.

    Each group contributes numbers and their squares: of n equal numbers, n times the sum of squares is the square of
    the sum, and of others it is more.
    """
    digest = xxhash.xxh3_64_intdigest(text.encode())
    numbers = [digest >> shift & (1 << _BITS) - 1 for shift in (0, _BITS)]
    numbers += [number**2 for number in numbers]
    sums, count = total(manager, numbers, device), manager.num_participants()
    return manager.errored() is not None or sums == [count * number for number in numbers]
