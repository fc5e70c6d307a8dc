"""Which of a model's buffers forward has changed, so that just those are sent after a step."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING

from torch import nn

from booster_runtime.sharding.agreement import send_first

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup


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
        self._children: list[nn.Module | None] | None = None
        self.forget()

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers by name, the same names on every rank."""
        found: dict[int, tuple[str, Tensor]] = {}  # each once, under its first name
        for prefix, module in self._modules():
            for name, buffer in module._buffers.items():  # noqa: SLF001 - the public generators take most of the time
                if buffer is not None:
                    found.setdefault(id(buffer), (f"{prefix}.{name}" if prefix else name, buffer))
        return dict(found.values())

    def _modules(self) -> Iterable[tuple[str, nn.Module]]:
        """Return the model's modules by name, which are searched for again where one has other children than before."""
        children = [child for module in self._named.values() for child in module._modules.values()]  # noqa: SLF001
        if children != self._children:
            self._named = dict(self._model.named_modules())
            self._children = [child for module in self._named.values() for child in module._modules.values()]  # noqa: SLF001
        return self._named.items()

    def changed(self) -> list[bool]:
        """Return for each buffer whether it has changed since `forget`."""
        statistics = {
            id(buffer)
            for _, module in self._modules()
            if isinstance(module, nn.modules.batchnorm._NormBase) and module.training  # noqa: SLF001 - their common base
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
