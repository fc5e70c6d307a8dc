"""Values of the first rank for every rank: all at `boost`, and buffers that forward has changed after a step."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING

import torch
from torch import nn

from booster_runtime import collectives

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

_MESSAGE_BYTES = 32 << 20


def agree_on_values(model: nn.Module) -> None:
    """Give every rank the first rank's parameters and buffers, whatever seeds the ranks built the model with.

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


class BufferWatch:
    """Notices changes of a model's buffers, by torch's version counters.

    Kernels of normalisation layers write running statistics past those; they count as changed while the layer trains.

    Args:
        model: The user's model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen: dict[str, tuple[Tensor, int]] = {}
        self._named: dict[str, nn.Module] = {}
        self._inside: list[nn.Module | None] | None = None
        self.forget()

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers by name, the same names on every rank."""
        found: dict[int, tuple[str, Tensor]] = {}  # each once, under its first name
        for prefix, module in self._modules().items():
            # The public generators take most of the time, and most modules have none.
            for name, buffer in module._buffers.items() if module._buffers else ():  # noqa: SLF001
                if buffer is not None:
                    found.setdefault(id(buffer), (f"{prefix}.{name}" if prefix else name, buffer))
        return dict(found.values())

    def _modules(self) -> dict[str, nn.Module]:
        """Return the model's modules by name, which are searched for again where one has other children than before."""
        if self._children() != self._inside:
            self._named = dict(self._model.named_modules())
            self._inside = self._children()
        return self._named

    def _children(self) -> list[nn.Module | None]:
        parents = [module._modules for module in self._named.values()]  # noqa: SLF001 - as above
        return [child for children in parents if children for child in children.values()]

    def changed(self) -> list[bool]:
        """Return for each buffer whether it has changed since `forget`."""
        statistics = {
            id(buffer)
            for module in self._modules().values()
            if module._buffers and isinstance(module, nn.modules.batchnorm._NormBase) and module.training  # noqa: SLF001 - their common base
            for buffer in module.buffers(recurse=False)
        }
        return [
            id(buffer) in statistics
            or name not in self._seen
            or self._seen[name][0] is not buffer
            or self._seen[name][1] != _version(buffer)
            for name, buffer in self.buffers().items()
        ]

    def send_changed(self, has_changed: Sequence[bool], group: ProcessGroup | None = None) -> None:
        """Give every rank the first rank's values of some buffers, and count all as unchanged.

        Args:
            has_changed: For each buffer, in the order of `changed`, whether it changed on any rank.
            group: The ranks that share the values; ``None`` for all.

        Collective: the group, where any buffer has changed; else none.
        """
        if not any(has_changed):
            return
        send_first(compress(self.buffers().values(), has_changed), group)
        self.forget()

    def forget(self) -> None:
        """Count all buffers as unchanged from now on."""
        self._seen = {name: (buffer, _version(buffer)) for name, buffer in self.buffers().items()}


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - how autograd notices changes too
