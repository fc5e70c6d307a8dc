"""Every rank begins with the first rank's values, whatever seeds the ranks built the model with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from booster_runtime import collectives

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

_MESSAGE_BYTES = 32 << 20


def agree_on_values(model: nn.Module) -> None:
    """Give every rank the first rank's parameters and buffers.

    Collective: every rank of the world.
    """
    send_first(tensor.data for tensor in [*model.parameters(), *model.buffers()])


def send_first(tensors: Iterable[Tensor], group: ProcessGroup | None = None) -> None:
    """Give every rank of a group (``None`` for all) the first rank's values of tensors of any strides.

    Small ones travel together, those of one format and device in one message.

    Args:
        tensors: Of the same shapes, formats and order on every rank.
        group: The ranks; ``None`` for all.

    Collective: every rank of the group.
    """
    for together in _messages(tensors):
        dense = [each.contiguous() for each in together]
        # Backends move numbers; truth values are bytes to them.
        sent = [each.view(torch.uint8) if each.dtype == torch.bool else each for each in dense]
        if len(sent) == 1:
            collectives.broadcast(sent[0], group).wait()
        else:
            flat = torch.cat([each.reshape(-1) for each in sent])
            collectives.broadcast(flat, group).wait()
            parts = torch.split(flat, [each.numel() for each in sent])
            with torch.inference_mode():  # which lets buffers be written that were made in it
                torch._foreach_copy_(sent, [part.view(each.shape) for part, each in zip(parts, sent, strict=True)])
        for each, received in zip(together, dense, strict=True):
            if received is not each:
                each.copy_(received)


def _messages(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors of one format and device together, of at most `_MESSAGE_BYTES` where there are several."""
    begun: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    num_bytes: dict[tuple[torch.device, torch.dtype], int] = {}
    for each in tensors:
        key = each.device, each.dtype
        if num_bytes.get(key, 0) + each.nbytes > _MESSAGE_BYTES and key in begun:
            yield begun.pop(key)
            num_bytes[key] = 0
        begun.setdefault(key, []).append(each)
        num_bytes[key] = num_bytes.get(key, 0) + each.nbytes
    yield from begun.values()
