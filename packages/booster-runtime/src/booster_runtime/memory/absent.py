"""Tensors whose values are not here: they have their shapes, and any use of their values is seen.

A tensor without values is given, by ``.data = shell``, no memory and a dispatch key that torch itself never sets. The
key is above those of autograd and function transforms, so whatever reads or writes the tensor, from Python or from
C++, comes to one function here first. That function calls `AbsentTensors.on_use`, which brings the values (``.data =
values`` takes the key away) or raises. The object, its version counter, its hooks and its place in graphs stay what
they were, and a tensor whose values are here costs nothing.

What never reaches the dispatcher (``print``, pickling, ``data_ptr``, and kernels of torch.compile, which get addresses)
is seen by a class over the tensor's own. The compiler leaves the calls of its ``__torch_function__`` as they are.

Not seen: views, and what ``.data`` gave, that were made while the values were here. They keep these alive. Where torch
lets no tensor have that key (`sees_all_uses`), the class is all there is, over memory of one element, NaN: uses by C++
are not seen then.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import _C
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

__all__ = ["AbsentTensors", "is_absent", "only_describes", "values_of"]

# Everything of torch that is not public is named here, and only here.
_NAME = (
    "TESTING_ONLY_GenericWrapper"  # above autograd and functorch, without a kernel of torch's, in torch 2.10 to 2.15
)
_BIT: Any = None
_KEY: Any = None
with contextlib.suppress(RuntimeError):  # another torch may lack it: `AbsentTensors` tells of it, not the import
    _BIT = _C._dispatch_key_parse(_NAME)  # noqa: SLF001
    _KEY = _C.DispatchKeySet(_BIT)
_keys_of: Any = _C._dispatch_keys  # noqa: SLF001
_without_key: Any = _C._ExcludeDispatchKeyGuard  # noqa: SLF001
_without_class: Any = _C.DisableTorchFunctionSubclass
_message_of_storage: Any = getattr(_C, "_set_storage_data_ptr_access_error_msg", None)  # in builds for CUDA
_SET_DATA = "aten::_has_compatible_shallow_copy_type"
"""What torch asks when a script assigns ``.data``."""

_libraries: list[torch.library.Library] = []
"""Kept until the process ends: what they registered would outlive them, and be called with other arguments."""
_owners: Any = WeakIdKeyDictionary()
"""For each tensor, a weak reference to the `AbsentTensors` that it is one of."""
_classes: dict[type, type] = {}
_assigning: list[AbsentTensors] = []
"""Those that are being hidden or shown."""


class AbsentTensors:
    """Tensors whose values come and go together.

    Args:
        tensors: The tensors, which are contiguous, with or without their values.
        dtype: Their dtype; they may have another one now.
        device: Where they are.
        on_use: Called with the position of one that is used without values, and with what uses it. It brings the values
            of all by `show`, or raises; what it returns, if anything, is entered for the duration of the use.

    Collective: none of its methods; ``on_use`` may be.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        on_use: Callable[[int, str], AbstractContextManager[None] | None],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if _BIT is None:
            msg = (
                f"torch {torch.__version__} has no dispatch key {_NAME}, by which uses of gathered parameters are "
                "seen. Use a version from 2.10 to 2.15, or plugin='zero' without `overlap_allgather`, 'ddp' or 'fsdp'."
            )
            raise ConfigError(msg)
        _listen()
        self.on_use = on_use
        self._tensors = tensors
        self._classes = [_own_class(tensor) for tensor in tensors]
        self._absent_classes = [_absent_class(own) for own in self._classes]
        make = _shell if sees_all_uses(device) else _placeholder
        with torch.inference_mode(mode=False), _C.DisableTorchFunction():
            self._shells = [make(tensor.shape, dtype, device) for tensor in tensors]
        own = weakref.ref(self)
        self._owners_before = [_owners.get(tensor) for tensor in tensors]
        for position, tensor in enumerate(tensors):
            _owners[tensor] = (own, position)

    def hide(self) -> None:
        """Take the values away from the tensors; memory that nobody else refers to is freed."""
        self._assign(self._shells)
        for tensor, absent in zip(self._tensors, self._absent_classes, strict=True):
            tensor.__class__ = absent

    def show(self, values: Iterable[Tensor]) -> None:
        """Give the tensors values, in the shapes, dtypes and on the devices that they have."""
        self._assign(values)

    def end(self, values: Iterable[Tensor]) -> None:
        """Give the tensors values, and leave them to the `AbsentTensors` whose they were before this one."""
        self.show(values)
        for tensor, before in zip(self._tensors, self._owners_before, strict=True):
            if before is None:
                del _owners[tensor]
            else:
                _owners[tensor] = before

    def _assign(self, values: Iterable[Tensor]) -> None:
        for tensor, own in zip(self._tensors, self._classes, strict=True):
            tensor.__class__ = own
        _assigning.append(self)
        try:
            with _without_key(_KEY):
                for tensor, each in zip(self._tensors, values, strict=True):
                    tensor.data = each
        finally:
            _assigning.pop()


def is_absent(tensor: Tensor) -> bool:
    """Return whether a tensor's values are not here."""
    return isinstance(tensor, _Absent) or (_BIT is not None and bool(_keys_of(tensor).has(_BIT)))


def sees_all_uses(device: torch.device) -> bool:
    """Return whether uses by C++ are seen, too: not on devices that torch has no backend of its own for."""
    return device.type != _C._get_privateuse1_backend_name()  # noqa: SLF001 - no public name


class _Absent:
    """What comes before the class of a tensor without values."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what describes a tensor; bring values for everything else, or raise."""
        if torch.compiler.is_dynamo_compiling():
            return _call_uncompiled(func, args, kwargs or {})
        return _call(func, args, kwargs or {})

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a tensor of the class that this one stands before, as code does that makes one like another."""
        return cls.__mro__[2](*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        with values_of(self, "deepcopy"):
            return copy.deepcopy(self, memo)  # of its own class by now

    def __repr__(self, **_: Any) -> str:
        me: Any = self
        return f"{_own_class(me).__name__}(shape={tuple(me.shape)}, dtype={me.dtype}, values are not here)"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with values_of(self, "pickle"):
            return self.__reduce_ex__(protocol)  # of its own class by now


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    if only_describes(func):
        with _without_class():
            return func(*args, **kwargs)
    if func is torch.Tensor.view_as and args[0] is args[1] and torch.is_grad_enabled():
        # How torch finds the node that accumulates gradients. Without gradients it is the view that a function of a
        # user's own returns.
        with _without_class(), _without_key(_KEY):
            return func(*args)
    if func in (torch.autograd.grad, torch.autograd.backward):  # which read nothing of what they differentiate by
        args = (args[0], *(tree_map(_edge, each) for each in args[1:]))
        return func(*args, **{name: tree_map(_edge, value) for name, value in kwargs.items()})
    with values_of((args, kwargs), func):
        return func(*args, **kwargs)


_call_uncompiled = _disable_dynamo(_call)


def _own_class(tensor: Tensor) -> type:
    """Return the class that a tensor has while its values are here."""
    return type(tensor).__mro__[2] if isinstance(tensor, _Absent) else type(tensor)


def _absent_class(own: type) -> type:
    if own not in _classes:
        _classes[own] = type(f"Absent{own.__name__}", (_Absent, own), {})
    return _classes[own]


class _Shell(torch.Tensor):
    """The form of a tensor over no memory, with the key."""

    @staticmethod
    def __new__(cls: Any, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Any:
        make: Any = torch.Tensor._make_wrapper_subclass  # noqa: SLF001
        made = make(cls, shape, strides=_strides(shape), dtype=dtype, device=device, _extra_dispatch_keys=_KEY)
        if _message_of_storage is not None:  # also where a kernel asks for the address
            text = "This tensor's values are not here."
            _message_of_storage(torch.Tensor.untyped_storage(made)._cdata, text)  # noqa: SLF001
        return made

    __torch_function__ = _C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> NoReturn:
        msg = f"a shell was computed with, by {func}"
        raise AssertionError(msg)


def _shell(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Any:
    return _Shell(shape, dtype, device)


def _placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device).expand(shape)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


# ---- uses


def values_of(values: Any, func: Any) -> AbstractContextManager[Any]:
    """Bring the values of all absent tensors in nested containers for a use, or raise; return what to enter for it."""
    entered: contextlib.ExitStack | None = None
    for each in tree_leaves(values):
        if not isinstance(each, torch.Tensor) or not is_absent(each):
            continue
        reference, position = _owners.get(each, (None, 0))
        owner = None if reference is None else reference()
        if owner is None:
            msg = (
                f"`{_name_of(func)}` needs values that are not here: of a view of a parameter that is kept in shards, "
                "or of a parameter whose boosted model is gone."
            )
            raise ConfigError(msg)
        during = owner.on_use(position, _name_of(func))
        assert not is_absent(each), "whoever does not raise brings values"
        if during is not None:
            entered = entered or contextlib.ExitStack()
            entered.enter_context(during)
    return entered or contextlib.nullcontext()


def _on_dispatch(operation: Any, *args: Any, **kwargs: Any) -> Any:
    if operation.name() == _SET_DATA:
        if _assigning:  # function transforms ask once more, without what is excluded
            with _without_key(_KEY):
                return operation(*args, **kwargs)
        with values_of(args[:1], ".data = ..."):
            return operation(*args, **kwargs)
    with values_of((args, kwargs), operation):
        return operation(*args, **kwargs)


def _listen() -> None:
    """Let torch call `_on_dispatch` for whatever gets a tensor with the key."""
    if _libraries:
        return
    library: Any = torch.library.Library
    everything, aten = library("_", "IMPL"), library("aten", "IMPL")
    _libraries.extend((everything, aten))
    everything.fallback(_on_dispatch, _NAME)
    # By name as well: under a dispatch mode, or next to a subclass of tensors, torch does not find the fallback.
    for name in _C._dispatch_get_all_op_names():  # noqa: SLF001
        if name.startswith("aten::"):
            base, _, overload = name.removeprefix("aten::").partition(".")
            schema = _C._get_schema(f"aten::{base}", overload)  # noqa: SLF001
            if any("Tensor" in str(argument.type) for argument in schema.arguments):
                aten.impl(name.removeprefix("aten::"), _calling(base, overload or "default"), _NAME)


def _calling(base: str, overload: str) -> Callable[..., Any]:
    """Return what passes a call on; its operation is made when it is called first, which most of 3,000 never are."""
    return lambda *args, **kwargs: _on_dispatch(getattr(getattr(torch.ops.aten, base), overload), *args, **kwargs)


def _edge(value: Any) -> Any:
    is_one = isinstance(value, torch.Tensor) and is_absent(value)
    return torch.autograd.graph.get_gradient_edge(value) if is_one else value


def _name_of(func: Any) -> str:
    if isinstance(func, str):
        return func
    if isinstance(func, torch._ops.OpOverload):  # noqa: SLF001
        return str(func.overloadpacket.__name__)
    name, owner = getattr(func, "__name__", str(func)), getattr(getattr(func, "__self__", None), "__name__", "")
    return f".{owner}" if name == "__get__" else f".{owner} = ..." if name == "__set__" else name


# ---- descriptions

_VALUE_PROPERTIES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
"""Attributes of a tensor that lead to its values; all others only describe it."""
_SETTERS = frozenset({"grad", "requires_grad"})

_DESCRIPTIONS: frozenset[Any] = frozenset(
    {
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.ndimension,
        torch.Tensor.numel,
        torch.Tensor.nelement,
        torch.Tensor.stride,
        torch.Tensor.element_size,
        torch.Tensor.storage_offset,
        torch.Tensor.is_contiguous,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_complex,
        torch.Tensor.is_inference,
        torch.Tensor.is_conj,
        torch.Tensor.is_neg,
        torch.Tensor._is_view,  # noqa: SLF001 - torch.compile asks
        torch.Tensor.get_device,
        torch.Tensor.requires_grad_,
        torch.Tensor.register_hook,
        torch.Tensor.register_post_accumulate_grad_hook,
        torch.Tensor.retain_grad,
        torch.Tensor.__len__,
        torch.Tensor.__hash__,
        torch.is_floating_point,
        torch.is_complex,
        torch.is_inference,
        torch.numel,
        torch.result_type,
    }
)


def only_describes(func: Any) -> bool:
    """Return whether a torch function, or an accessor of an attribute, reads and writes no values of its tensors."""
    if func in _DESCRIPTIONS:
        return True
    name, owner = getattr(func, "__name__", ""), getattr(getattr(func, "__self__", None), "__name__", "")
    return (name == "__get__" and owner not in _VALUE_PROPERTIES) or (
        name in ("__set__", "__delete__") and owner in _SETTERS
    )
