"""Every rank begins with the first rank's values, whatever seeds the ranks built the model with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from booster_runtime import collectives

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup


def agree_on_values(model: nn.Module) -> None:
    """Give every rank the first rank's parameters and buffers.

    Collective: every rank of the world.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        send_first(tensor.data)


def send_first(tensor: torch.Tensor, group: ProcessGroup | None = None) -> None:
    """Give every rank of a group (``None`` for all) the first rank's values of a tensor of any strides.

    Collective: every rank of the group.
    """
    dense = tensor.contiguous()
    # Backends move numbers; truth values are bytes to them.
    collectives.broadcast(dense.view(torch.uint8) if dense.dtype == torch.bool else dense, group).wait()
    if dense is not tensor:
        tensor.copy_(dense)
