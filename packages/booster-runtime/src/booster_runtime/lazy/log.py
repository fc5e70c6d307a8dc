"""What a recording consists of: entries in program order, the storages and the real tensors that they refer to.

And what is known of torch's operations: which make tensors from nothing, which overwrite, which read.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch.utils._python_dispatch import _disable_current_modes

from booster_core.state import as_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from booster_runtime.lazy.generators import Draw
    from booster_runtime.lazy.tensor import LazyTensor


@dataclass(frozen=True)
class Ref:
    """A view of a recorded storage.

    Args:
        slot: Number of the storage in its recording.
        dtype: Element type of the view.
        device: The storage's recorded device.
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

    def view_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the view, of a real storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


class Constant:
    """The values of a real tensor that an operation reads, copied: whoever has the tensor may change it later.

    Args:
        tensor: The tensor.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.values = tensor.clone()

    @functools.cached_property
    def digest(self) -> int:
        """The xxh3 (64 bits) of shape, dtype and values, the same in every process."""
        with _disable_current_modes(), torch.no_grad():
            plain = self.values.detach()
            if plain.layout != torch.strided:
                plain = plain.to_dense()
            plain = plain.cpu().contiguous().resolve_conj().resolve_neg()
            digest = xxhash.xxh3_64(f"{tuple(plain.shape)} {plain.dtype}".encode())
            if plain.numel():
                digest.update(as_bytes(plain))
            return digest.intdigest()


@dataclass(eq=False)
class Entry:
    """One recorded operation.

    Args:
        name: The operation, such as ``"aten::normal_"``.
        function: What to call.
        args: Positional arguments, `Ref` and `Constant` in place of tensors.
        kwargs: Keyword arguments, likewise.
        reads: Storages whose values it needs.
        writes: Storages that it writes in place.
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


class Storages:
    """Numbers storages in the order in which they are met."""

    def __init__(self) -> None:
        self._devices: list[torch.device] = []
        self._storages: list[torch.UntypedStorage] = []
        self._number_of: dict[int, int] = {}

    def ref_of(self, tensor: LazyTensor) -> Ref:
        """Return a tensor's place in the recording."""
        inner = tensor.lazy_inner
        return Ref(
            self._number(inner, tensor.device),
            inner.dtype,
            tensor.device,
            tuple(inner.size()),
            inner.stride(),
            int(inner.storage_offset()),
        )

    def knows(self, inner: torch.Tensor) -> bool:
        """Return whether a meta tensor is a view of a storage that has a number."""
        return inner.untyped_storage()._cdata in self._number_of  # noqa: SLF001 - what identifies a storage

    def covers(self, ref: Ref) -> bool:
        """Return whether a view is all of its storage."""
        if math.prod(ref.size) * ref.dtype.itemsize != self._storages[ref.slot].nbytes():
            return False
        steps = sorted((stride, size) for stride, size in zip(ref.stride, ref.size, strict=True) if size > 1)
        expected = 1
        for stride, size in steps:
            if stride != expected:
                return False
            expected *= size
        return True

    def num_bytes(self, slot: int) -> int:
        """Return the size of a storage."""
        return self._storages[slot].nbytes()

    def device(self, slot: int) -> torch.device:
        """Return the recorded device of a storage."""
        return self._devices[slot]

    def _number(self, inner: torch.Tensor, device: torch.device) -> int:
        storage = inner.untyped_storage()
        number = self._number_of.get(storage._cdata)  # noqa: SLF001 - as above
        if number is None:
            number = self._number_of[storage._cdata] = len(self._storages)  # noqa: SLF001
            self._storages.append(storage)  # kept, so that its address stays its own
            self._devices.append(device)
        return number


FACTORIES = frozenset(
    f"aten::{name}"
    for name in (
        "empty",
        "empty_strided",
        "empty_like",
        "empty_permuted",
        "new_empty",
        "new_empty_strided",
        "zeros",
        "zeros_like",
        "new_zeros",
        "ones",
        "ones_like",
        "new_ones",
        "full",
        "full_like",
        "new_full",
    )
)
"""What makes a tensor without needing values. Constants (``arange``, ``linspace``, literals) stay real: what reads them
is then computed as in eager construction, and they are small."""

UNSET = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_strided", "empty_like", "empty_permuted", "new_empty", "new_empty_strided")
)
"""Those whose results hold nothing yet."""

COPIES = frozenset({"aten::_to_copy", "aten::clone"})
"""What makes a tensor of its first argument's values, in memory that a replay may choose."""

SHAPE_ONLY = frozenset(
    f"aten::{name}"
    for name in (
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
        "randint_like",
        "new_empty",
        "new_empty_strided",
        "new_zeros",
        "new_ones",
        "new_full",
    )
)
"""What asks a tensor for its shape, dtype and strides only."""

OVERWRITES = frozenset(
    f"aten::{name}_"
    for name in (
        "zero",
        "fill",
        "copy",
        "normal",
        "uniform",
        "random",
        "bernoulli",
        "exponential",
        "log_normal",
        "cauchy",
        "geometric",
    )
)
"""What writes its first argument without reading it."""

_UNTOLD_WRITES = {f"aten::{name}_batch_norm": ("running_mean", "running_var") for name in ("native", "cudnn", "miopen")}
"""Arguments that are written although torch's schema does not say so."""

_SMALL_NUMEL = 1024
"""Integers up to this number are made for real: they tend to steer construction."""


def is_random(func: Any) -> bool:
    """Return whether an operation draws from a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


def is_deferrable(func: Any, result: torch.Tensor) -> bool:
    """Return whether a tensor made without lazy inputs becomes lazy.

    Args:
        func: The operation.
        result: A meta tensor of the result's geometry.
    """
    if is_random(func):
        return True
    if not result.numel():  # a shell that is given a memory, as when files are unpickled
        return False
    return result.is_floating_point() or result.is_complex() or result.numel() > _SMALL_NUMEL


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the arguments that an operation writes in place, lists flattened."""
    untold = _UNTOLD_WRITES.get(func._schema.name, ())  # noqa: SLF001 - what dispatch modes are meant to read
    for number, argument in enumerate(func._schema.arguments):  # noqa: SLF001
        is_write = argument.alias_info is not None and argument.alias_info.is_write
        if not is_write and argument.name not in untold:
            continue
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        if isinstance(value, (list, tuple)):
            yield from value
        elif value is not None:
            yield value
