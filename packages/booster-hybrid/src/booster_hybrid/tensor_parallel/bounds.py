"""Indices of a whole vocabulary, checked where each rank looks at some of its rows and would take others for known."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from booster_hybrid.tensor_parallel.eager import outside_of_graphs

if TYPE_CHECKING:
    from torch import Tensor


@outside_of_graphs
def check_bounds(indices: Tensor, num_rows: int, what: str) -> None:
    """Check indices that are the same on every rank, as torch's own embedding and cross entropy do.

    On an accelerator nobody waits: as with torch's own, an assertion there ends the process.

    Args:
        indices: Any shape, integers.
        num_rows: Length of what they are indices of.
        what: What they are, for the message.

    Raises:
        IndexError: If one of them is out of bounds, on the CPU.

    Collective: none.
    """
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
