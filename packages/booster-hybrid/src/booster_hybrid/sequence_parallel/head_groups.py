"""Which heads ring attention works on at a time.

Heads attend independently of each other. So keys need not be on their way for all of them at once: a few heads' go
round, then those of the next few, and what is received, sent and added up meanwhile takes a part of the memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    HeadGroup = tuple[slice, slice]
    """Some query heads, and the key/value heads that they attend by."""

MOST_GROUPS = 4
"""The most groups whose keys go round one after the other: their buffers are then smaller than what a rank keeps."""
LEAST_BYTES = {"cpu": 1 << 20, "cuda": 1 << 24}
"""The least keys and values that go round at a time, by type of device: messages take time however small they are, and
devices need the work of many heads to be busy."""


def head_chunks(query: Tensor, key: Tensor, value: Tensor, longest: int) -> list[HeadGroup]:
    """Return the groups of heads whose keys and values go round one after the other; the same ones on every rank.

    Args:
        query: The queries, shape ``(batch, heads, positions, size)``.
        key: The keys.
        value: The values.
        longest: The largest number of a rank's keys.
    """
    bytes_of_head = key.shape[0] * longest * (key.shape[-1] + value.shape[-1]) * key.element_size()
    least_bytes = LEAST_BYTES.get(query.device.type, LEAST_BYTES["cuda"])
    step = max(_parts(key.shape[1], MOST_GROUPS), _parts(least_bytes, max(bytes_of_head, 1)))
    num_heads, share = key.shape[1], query.shape[1] // key.shape[1]
    ends = [(first, min(first + step, num_heads)) for first in range(0, num_heads, step)]
    return [(slice(first * share, last * share), slice(first, last)) for first, last in ends]


def placed(whole: Tensor | None, part: Tensor, heads: slice, num_heads: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor of all heads with what some of them have found.

    Args:
        whole: What was returned for the heads before; ``None`` for the first ones.
        part: Shape ``(batch, some heads, positions, ...)``.
        heads: Which they are.
        num_heads: Number of all heads; a part of all of them is returned itself.
        dtype: Format of the whole.
    """
    if part.shape[1] == num_heads:
        return part.to(dtype)
    if whole is None:
        batch, _, positions, *size = part.shape
        # In memory, positions come before heads, as in models and in what torch's kernels return.
        whole = part.new_empty((batch, positions, num_heads, *size), dtype=dtype).transpose(1, 2)
    whole[:, heads] = part
    return whole


def _parts(whole: int, part: int) -> int:
    """Return how many parts of a size a whole has, the last one perhaps smaller."""
    return -(-whole // part)
