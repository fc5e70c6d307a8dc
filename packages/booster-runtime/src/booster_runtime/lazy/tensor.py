"""The tensor that construction sees instead of a real one: shape, dtype, device and strides, and no values.

What it can't do is decided elsewhere: every operation on it goes to the recorder that made it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from booster_core.errors import LazyInitError

if TYPE_CHECKING:
    from booster_runtime.lazy.recorder import Recorder

_DATA: Any = torch._C.TensorBase.data  # noqa: SLF001 - torch's own setter, which ours wraps
DEVICE: Any = torch.ops.prim.device.default
"""What asks a tensor for its device."""
OWN_ATTRIBUTES = frozenset({"lazy_device", "lazy_inner", "lazy_recorder", "_is_param"})
"""What a lazy tensor has in its ``__dict__``, apart from attributes that others put there."""


class LazyTensor(torch.Tensor):
    """A tensor without values, made under `LazyInitContext`.

    Attributes:
        lazy_inner: A meta tensor of the same geometry; views share its storage as those of a real tensor would.
        lazy_recorder: Where its operations are recorded.
        lazy_device: Where it says it is.
    """

    lazy_device: torch.device
    lazy_inner: torch.Tensor
    lazy_recorder: Recorder

    @staticmethod
    def __new__(cls: type[LazyTensor], inner: torch.Tensor, device: torch.device, recorder: Recorder) -> LazyTensor:  # noqa: PYI034
        """Return a tensor that reports ``device``, with the geometry of a meta tensor."""
        tensor: LazyTensor = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - torch's documented way
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            # By its keys a meta tensor, so that torch refuses to put it into the memory of a real one: `.data = ...`
            # would leave that with no memory and an address of 0. `lazy_device` answers for it.
            device=torch.device("meta"),
            dispatch_device=True,
        )
        tensor.lazy_device = device
        tensor.lazy_inner = inner
        tensor.lazy_recorder = recorder
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001 - as torch's docs say

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        if func is DEVICE:
            return args[0].lazy_device
        return recorder_of((args, kwargs)).dispatch(func, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its history, as of any tensor."""
        detached: torch.Tensor = _DATA.__get__(self)
        return detached

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, LazyTensor):
            value = self.lazy_recorder.adopt(value)
        self.take_geometry(value)

    def take_geometry(self, value: LazyTensor) -> None:
        """Become another view of another storage, as assignment to ``data`` does."""
        _DATA.__set__(self, value)
        self.lazy_inner, self.lazy_device = value.lazy_inner, value.lazy_device

    def tolist(self) -> Any:
        """Return the values, found out by replaying what led to them."""
        return self.lazy_recorder.value_of(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values, found out by replaying what led to them."""
        return self.lazy_recorder.value_of(self).numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        values = self.numpy()
        return values if dtype is None else values.astype(dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyTensor:
        if id(self) in memo:
            known: LazyTensor = memo[id(self)]
            return known
        self.lazy_recorder.check_open("`copy.deepcopy` of a lazy model", "Copy it inside of the context")
        with torch.no_grad():
            copied = self.detach().clone().requires_grad_(self.requires_grad)
        assert isinstance(copied, LazyTensor), "clone is recorded"
        for name, value in self.__dict__.items():
            if name not in OWN_ATTRIBUTES or name == "_is_param":
                copied.__dict__[name] = value
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        msg = "A lazy tensor has no values to pickle or save. " + REMEDY
        raise LazyInitError(msg)

    def __repr__(self) -> str:  # type: ignore[override]
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"LazyTensor(size={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}'{grad})"


REMEDY = "Pass its model to `Booster.boost`, or to `booster_runtime.lazy.materialize`, first."
"""What to do about a tensor that is still lazy."""


def recorder_of(arguments: Any) -> Recorder:
    """Return the recorder of the lazy tensors among some arguments.

    Raises:
        LazyInitError: If they are of two recordings.
    """
    recorders = {
        id(leaf.lazy_recorder): leaf.lazy_recorder for leaf in tree_leaves(arguments) if isinstance(leaf, LazyTensor)
    }
    if len(recorders) > 1:
        msg = "Tensors of two `LazyInitContext`s meet in one operation. Build what belongs together in one context."
        raise LazyInitError(msg)
    return next(iter(recorders.values()))
