"""Fake tensors for dry runs: what operations return is remembered by the forms of what they are given.

A model of many layers does the same operations in each. Torch takes some 80 microseconds for each of them on fake
tensors; one that was seen before takes a quarter of that here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from booster_hybrid.tensor_parallel.split import is_repeated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from typing_extensions import Self

    from booster_hybrid.skipped_layers import FixedDraws

_PLAIN = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)
_DEPENDING = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view})
"""What marks operations whose results depend on more than forms, or that change a form."""


class _Form(NamedTuple):
    """All of a fake tensor but its memory.

    Args:
        shape: As torch's.
        stride: Likewise.
        dtype: Likewise.
        device: Likewise.
        offset: Where it begins in its memory.
        viewed: Which of an operation's tensors it shares its memory with.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int
    viewed: int | None = None


class _OtherError(Exception):
    """An operation's arguments are of kinds of which nothing is remembered."""


class Fakes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which tensors are fake.

    Args:
        draws: What single random numbers are.
        narrow: Whether floating tensors become bf16.
    """

    supports_higher_order_operators = True

    def __init__(self, draws: FixedDraws, *, narrow: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws
        self._torch, self._narrow = FakeTensorMode(allow_non_fake_inputs=True), narrow
        self._known: dict[Any, tuple[type, tuple[_Form | None, ...]]] = {}

    def __enter__(self) -> Self:
        """Begin, inside of torch's own mode."""
        self._torch.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        """End both."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._torch.__exit__(*error)  # type: ignore[arg-type]

    def like(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor like another one; contiguous where that only stands in for one without values."""
        dtype = torch.bfloat16 if self._narrow and tensor.is_floating_point() else tensor.dtype
        if is_repeated(tensor):
            return torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
        if not isinstance(tensor, nn.Parameter):
            return self._torch.from_tensor(tensor).to(dtype)
        has_own_memory = type(tensor) is nn.Parameter and tensor.layout is torch.strided
        if has_own_memory and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
            return self._new(_Form(tensor.shape, tensor.stride(), dtype, tensor.device, 0), ())
        return self._torch.from_tensor(tensor).detach().to(dtype)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return what an operation returns."""
        del types
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return args[0].device
        if func is torch.ops.aten.lift_fresh.default and not args[0].numel():  # as what caches begin with
            return self._new(_Form(args[0].shape, args[0].stride(), args[0].dtype, args[0].device, 0), ())
        drawn = self._draws.drawn(func, args, kwargs)
        if drawn is not None:
            return drawn
        tensors: list[Any] = []
        key = _key_of(func, args, kwargs, tensors)
        found = None if key is None else self._known.get(key)
        if found is None:
            output = func(*args, **kwargs)
            seen = None if key is None else _forms_of(output, tensors)
            if seen is not None:
                self._known[key] = seen
            return output
        kind, forms = found
        made = [None if form is None else self._new(form, tensors) for form in forms]
        return made[0] if kind is FakeTensor else kind(made)

    def _new(self, form: _Form, tensors: Sequence[Tensor]) -> Tensor:
        with no_dispatch():
            if form.viewed is None:
                values = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="meta")
            else:
                values = torch.empty(0, dtype=form.dtype, device="meta")
                values.set_(tensors[form.viewed].untyped_storage(), form.offset, form.shape, form.stride)
            return FakeTensor(self._torch, values, form.device)


def _key_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any]) -> Any:
    """Return what an operation's result is remembered by, and add the tensors among its arguments to a list.

    Returns:
        ``None`` if it depends on more than forms, as torch knows the values of some tensors, or writes to a tensor.
    """
    if not isinstance(func, torch._ops.OpOverload):  # noqa: SLF001 - such as a loop, which takes functions
        return None
    try:
        key = func, torch.get_default_dtype(), _key(args, tensors), *_key((*kwargs.items(),), tensors)
    except _OtherError:
        return None
    is_constant = bool(tensors) and all(tensor.constant is not None for tensor in tensors)
    is_mutable = func._schema.is_mutable  # noqa: SLF001 - torch tells it nowhere else
    return None if is_constant or is_mutable or not _DEPENDING.isdisjoint(func.tags) else key


def _key(values: Sequence[Any], tensors: list[Any]) -> tuple[Any, ...]:
    """Return what arguments are, to be compared, and add the tensors among them to a list.

    Raises:
        _OtherError: If one can't be compared.
    """
    key: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.layout is not torch.strided or value.is_conj() or value.is_neg():
                raise _OtherError
            tensors.append(value)
            key.append((value.shape, value.stride(), value.dtype, value.device, value.storage_offset()))
        elif kind in _PLAIN:
            key.append((kind, value))
        elif kind in (list, tuple):
            key.append(_key(value, tensors))
        else:
            raise _OtherError
    return tuple(key)


def _forms_of(output: Any, tensors: Sequence[Tensor]) -> tuple[type, tuple[_Form | None, ...]] | None:
    """Return what an operation has returned; ``None`` if that is no tensor, or tuple or list of such."""
    kind = type(output)
    if kind is not FakeTensor and kind not in (list, tuple):
        return None
    places = {tensor.untyped_storage()._cdata: place for place, tensor in enumerate(tensors)}  # noqa: SLF001 - as torch tells storages apart
    forms: list[_Form | None] = []
    made: list[int] = []
    for each in (output,) if kind is FakeTensor else output:
        if each is None:
            forms.append(None)
            continue
        is_other = type(each) is not FakeTensor or each.constant is not None or each.layout is not torch.strided
        if is_other or any(each is tensor for tensor in tensors):
            return None
        storage = each.untyped_storage()._cdata  # noqa: SLF001 - likewise
        viewed = places.get(storage)
        made += [] if viewed is not None else [storage]
        offset = each.storage_offset()
        if len({*made}) < len(made) or (viewed is None and offset) or each.is_conj() or each.is_neg():
            return None
        forms.append(_Form(each.shape, each.stride(), each.dtype, each.device, offset, viewed))
    return kind, tuple(forms)
