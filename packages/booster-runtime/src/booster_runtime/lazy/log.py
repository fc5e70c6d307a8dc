"""What a recording consists of: entries in program order, and references to storages that do not exist yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from booster_core.errors import LazyInitError
from booster_runtime.lazy.digests import digest_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from booster_runtime.lazy.streams import Draw


@dataclass(frozen=True)
class Ref:
    """A view of a recorded storage.

    Args:
        slot: Number of the storage in its recording.
        dtype: Element type of the view.
        device: Where the storage is recorded to lie.
        size: Shape.
        stride: Strides in elements.
        offset: First element, in elements of ``dtype``.
        is_shape_only: The operation asks for the view's geometry and not for its values, as ``empty_like`` does.
    """

    slot: int
    dtype: torch.dtype
    device: torch.device
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_shape_only: bool = False

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the view, of a real storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


class Const:
    """A real tensor that an operation reads.

    Args:
        tensor: The tensor itself, or a copy.
        is_watched: Others have it too, and may change it. Torch does not count every change (``.data`` hides them), so
            that a digest of the values is kept.
    """

    def __init__(self, tensor: torch.Tensor, *, is_watched: bool) -> None:
        self._tensor = tensor
        self._version = tensor._version  # noqa: SLF001 - the counter has no public name
        self._is_watched = is_watched
        self._digest = digest_of(tensor) if is_watched else None

    def digest(self) -> int:
        """Return a digest of the values, the same in every process."""
        if self._digest is None:
            self._digest = digest_of(self._tensor)
        return self._digest

    def is_view(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor of the same storage is this one, unchanged as far as torch has counted."""
        own = self._tensor
        return (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor._version) == (  # noqa: SLF001 - as above
            own.dtype,
            own.shape,
            own.stride(),
            own.storage_offset(),
            self._version,
        )

    def keep(self) -> None:
        """Copy the values, which are about to change.

        Raises:
            LazyInitError: If they were changed since they were recorded.
        """
        self._tensor = self.get().clone()
        self._is_watched = False

    def get(self) -> torch.Tensor:
        """Return the tensor.

        Raises:
            LazyInitError: If it was changed since it was recorded.
        """
        own = self._tensor
        if self._is_watched and (own._version != self._version or digest_of(own) != self._digest):  # noqa: SLF001
            msg = (
                f"A tensor of shape {tuple(own.shape)} that a lazy model's construction read was changed in "
                "place since, outside of `LazyInitContext`. Change a clone of it, or materialize the model before."
            )
            raise LazyInitError(msg)
        return own


@dataclass(eq=False)
class Entry:
    """One recorded operation.

    Args:
        name: The operation, such as ``"aten::normal_"``.
        function: What to call.
        args: Positional arguments, `Ref` and `Const` in place of tensors.
        kwargs: Keyword arguments, likewise.
        reads: Slots whose values it needs.
        writes: Slots that it writes in place.
        covers: Those of ``writes`` that it overwrites as a whole without reading them.
        results: Index among the output tensors and view, for each storage that it makes.
        draw: Its use of a random generator, if any.
        dtype: Torch's default dtype at the time.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    covers: frozenset[int] = frozenset()
    results: tuple[tuple[int, Ref], ...] = ()
    draw: Draw | None = None
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    @property
    def makes(self) -> frozenset[int]:
        """The storages that it makes."""
        return frozenset(ref.slot for _, ref in self.results)

    @property
    def touches(self) -> frozenset[int]:
        """All slots that it has to do with."""
        return self.reads | self.writes | self.makes

    @property
    def is_source(self) -> bool:
        """Whether it depends on nothing, so that it may run whenever its values are wanted first."""
        return self.draw is None and not self.reads and not self.writes
