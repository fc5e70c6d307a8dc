"""Cutting a batch into microbatches, and putting the outputs of microbatches together again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


def num_samples(batch: Any) -> int:
    """Return how many samples a batch has: the first dimension of its tensors.

    Args:
        batch: Tensors in any nest of dicts, lists and tuples. Tensors without dimensions, and whatever is no tensor,
            belong to all samples; so do tensors whose first dimension is 1.

    Raises:
        ConfigError: If it has no tensors, or they are of different lengths.
    """
    shapes = {
        pytree.keystr(path): tuple(leaf.shape)
        for path, leaf in pytree.tree_flatten_with_path(batch)[0]
        if isinstance(leaf, torch.Tensor) and leaf.dim()
    }
    lengths = {shape[0] for shape in shapes.values()}
    if len(lengths) > 1:
        lengths.discard(1)
    if len(lengths) != 1:
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or f"`{type(batch).__name__}`"
        msg = (
            f"The batch can't be split into microbatches: its tensors must have one entry per sample in their first "
            f"dimension, all of them the same number; got {found}. What is for all samples, such as class weights, "
            "belongs into the criterion, or needs a first dimension of 1."
        )
        raise ConfigError(msg)
    return lengths.pop()


def share_samples(count: int, num_microbatches: int | None, microbatch_size: int | None) -> list[int]:
    """Return the number of samples of each microbatch.

    Args:
        count: Samples of the batch.
        num_microbatches: Into how many parts to cut it; the first ones have a sample more where it does not divide.
        microbatch_size: Samples in each part, where ``num_microbatches`` is ``None``; the last has what is left.

    Raises:
        ConfigError: If there are fewer samples than parts.
    """
    if num_microbatches is None:
        size = microbatch_size or count
        return [min(size, count - start) for start in range(0, count, size)]
    if count < num_microbatches:
        msg = (
            f"A batch of {count} sample(s) can't be split into `num_microbatches={num_microbatches}`. Use larger "
            "batches (`drop_last=True` leaves out a last small one), fewer microbatches, or `microbatch_size`."
        )
        raise ConfigError(msg)
    share, more = divmod(count, num_microbatches)
    return [share + (index < more) for index in range(num_microbatches)]


def split_batch(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Return the microbatches of a batch, as views of its tensors.

    Args:
        batch: As for `num_samples`.
        sizes: Samples of each microbatch.
    """
    count, start, parts = sum(sizes), 0, []
    for size in sizes:

        def cut(tensor: torch.Tensor, first: int = start, length: int = size) -> torch.Tensor:
            return tensor.narrow(0, first, length) if tensor.dim() and tensor.shape[0] == count else tensor

        parts.append(pytree.tree_map_only(torch.Tensor, cut, batch))
        start += size
    return parts


def join_outputs(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return the outputs of a whole batch from those of its microbatches.

    Args:
        outputs: What the model returned for each, all of one form.
        sizes: Samples of each.

    Returns:
        In the same form: tensors with an entry per sample put together, other floating tensors averaged over samples;
        what is no tensor is that of the first microbatch if it is a plain value, else (a cache) ``None``.
    """
    flat = [pytree.tree_flatten(each) for each in outputs]
    leaves = [_joined([leaves[index] for leaves, _ in flat], sizes) for index in range(len(flat[0][0]))]
    return pytree.tree_unflatten(leaves, flat[0][1])


def _joined(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = values[0]
    if not isinstance(first, torch.Tensor):
        return first if isinstance(first, (bool, int, float, str, type(None))) else None
    tensors = [value.detach() for value in values]
    if all(tensor.dim() and tensor.shape[0] == size for tensor, size in zip(tensors, sizes, strict=True)) and (
        len({tensor.shape[1:] for tensor in tensors}) == 1
    ):
        return torch.cat(tensors)
    if first.is_floating_point() and len({tensor.shape for tensor in tensors}) == 1:
        total = sum(sizes)
        return torch.stack([tensor * (size / total) for tensor, size in zip(tensors, sizes, strict=True)]).sum(0)
    return tensors
