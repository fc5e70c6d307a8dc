"""Indices of a whole vocabulary, checked where each rank looks at some of its rows and would take others for known."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def within_bounds(indices: Tensor, num_rows: int, what: str) -> Tensor:
    """Return indices that are the same on every rank, after a check as torch's own embedding and cross entropy do it.

    On an accelerator nobody waits: as with torch's own, an assertion there ends the process.

    Args:
        indices: Any shape, integers.
        num_rows: Length of what they are indices of.
        what: What they are, for the message.

    Raises:
        IndexError: If one of them is out of bounds, on the CPU.
    """
    if torch.compiler.is_compiling():
        checked: Tensor = _within_bounds(indices, num_rows, what)
        return checked
    _check(indices, num_rows, what)
    return indices


# In a graph, what is checked is another tensor: a compiler leaves out what nobody reads.
@torch.library.custom_op("booster_hybrid::within_bounds", mutates_args=())
def _within_bounds(indices: torch.Tensor, num_rows: int, what: str) -> torch.Tensor:
    _check(indices, num_rows, what)
    return indices.clone()


@_within_bounds.register_fake
def _(indices: torch.Tensor, num_rows: int, what: str) -> torch.Tensor:
    del num_rows, what
    return torch.empty_like(indices)


def _check(indices: Tensor, num_rows: int, what: str) -> None:
    if not indices.numel():
        return
    if indices.device.type != "cpu":
        is_inside = ((indices >= 0) & (indices < num_rows)).all()
        torch._assert_async(is_inside, f"{what} out of bounds")  # noqa: SLF001 - no public name
        return
    low, high = (int(each) for each in torch.aminmax(indices))
    if low < 0 or high >= num_rows:
        worst = low if low < 0 else high
        msg = f"{what} {worst} is out of bounds: there are {num_rows}, numbered from 0. Correct the data."
        raise IndexError(msg)
