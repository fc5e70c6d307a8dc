"""What is replaced while a context is open: assignment to `data`, initialisers that loop, and `safe_open`."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode

from booster_checkpoint.files import SafetensorsFile
from booster_core.errors import LazyInitError
from booster_runtime.lazy.files import FileRead, empty_like
from booster_runtime.lazy.tensor import LazyTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from typing_extensions import Self

    from booster_runtime.lazy.recorder import Recorder

_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_KINDS = (torch.Tensor, nn.Parameter)


class Assignments(TorchFunctionMode):
    """Sees assignments to ``data`` of real tensors; those of lazy ones go through `LazyTensor.data`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        if func == _SET_DATA and isinstance(args[1], LazyTensor) and not isinstance(args[0], LazyTensor):
            return become_lazy(args[0], args[1])
        return func(*args, **(kwargs or {}))


def become_lazy(real: Tensor, value: LazyTensor) -> None:
    """Let a real tensor object be a lazy one from now on, another view of the storage of ``value``.

    Raises:
        LazyInitError: If the tensor has gradients, hooks, weak references or a class of its own.
    """
    holds = [name for name in ("_backward_hooks", "_post_accumulate_grad_hooks") if getattr(real, name, None)]
    if real.grad is not None:
        holds.append("grad")
    is_plain = type(real) in _KINDS or isinstance(real, UninitializedTensorMixin)
    problem = "" if is_plain else f"it is a `{type(real).__name__}`"
    if holds:
        problem = f"it has `{holds[0]}`"
    if not problem:
        lazy = value.detach()
        lazy.requires_grad_(real.requires_grad)
        lazy.__dict__.update(real.__dict__)
        if isinstance(real, nn.Parameter):
            lazy._is_param = True  # noqa: SLF001 - how torch marks parameters
        try:
            torch.utils.swap_tensors(real, lazy)  # type: ignore[no-untyped-call]
        except RuntimeError as cause:
            problem = str(cause)
    if problem:
        msg = (
            f"`.data` of a real tensor was set to a lazy one of shape {tuple(value.shape)}, and can't become lazy: "
            f"{problem.rstrip('. ')}. Make both inside of one `LazyInitContext`, or both outside."
        )
        raise LazyInitError(msg)


@contextmanager
def substitutes(recorder: Recorder) -> Iterator[None]:
    """Let initialisers that loop be one operation each, and uninitialised parameters become lazy ones."""
    with _recorded_trunc_normal(recorder), _lazy_materialize():
        yield


@contextmanager
def _recorded_trunc_normal(recorder: Recorder) -> Iterator[None]:
    """Record initialisers that loop until their values fit as one operation each.

    Without this they would be right as well, but every turn of the loop would replay what its values depend on.
    """
    original: Any = getattr(torch.nn.init, "_no_grad_trunc_normal_", None)
    if original is None:
        yield
        return

    def trunc_normal(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(tensor, LazyTensor):
            result: torch.Tensor = original(tensor, *args, **kwargs)
            return result
        recorder.record_call("torch.nn.init.trunc_normal_", original, tensor, *args, **kwargs)
        return tensor

    torch.nn.init._no_grad_trunc_normal_ = trunc_normal
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = original


@contextmanager
def _lazy_materialize() -> Iterator[None]:
    """Let what ``nn.LazyLinear`` and its like make in a dry run be lazy: torch would rename its class afterwards."""
    original: Any = UninitializedTensorMixin.materialize

    def materialize(self: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        value = torch.empty(shape, device=device or self.data.device, dtype=dtype or self.data.dtype)
        if isinstance(value, LazyTensor):
            become_lazy(self, value)
        else:
            original(self, shape, device, dtype)

    UninitializedTensorMixin.materialize = materialize
    try:
        yield
    finally:
        UninitializedTensorMixin.materialize = original


@contextmanager
def lazy_files(recorder: Recorder) -> Iterator[None]:
    """Let ``safe_open`` return lazy tensors within the body, wherever a module has imported it already.

    A module that is imported meanwhile keeps the stand-in, which then opens files as the original does. So it does in
    other threads: what they open is not this context's model.
    """
    import safetensors

    original: Any = safetensors.safe_open
    owner = threading.get_ident()

    def open_lazily(filename: Any, framework: str = "pt", *args: Any, **kwargs: Any) -> Any:
        opened = original(filename, framework, *args, **kwargs)
        device = kwargs.get("device", args[0] if args else "cpu")
        if (
            not recorder.is_open
            or threading.get_ident() != owner
            or framework not in ("pt", "torch", "pytorch")
            or str(device) != "cpu"
        ):
            return opened
        return _LazyFile(opened, Path(filename).resolve(), recorder)

    _replace_everywhere(original, open_lazily)
    try:
        yield
    finally:
        _replace_everywhere(open_lazily, original)


def _replace_everywhere(old: Any, new: Any) -> None:
    """Let each imported module's ``safe_open`` be another function."""
    for module in list(sys.modules.values()):
        # `None` bars an import, and anything may stand in for a module. Not `getattr`, which would import lazy ones.
        if isinstance(module, ModuleType) and vars(module).get("safe_open") is old:
            module.safe_open = new  # type: ignore[attr-defined]


class _LazyFile:
    """What ``safe_open`` returns, with lazy tensors in it."""

    def __init__(self, opened: Any, path: Path, recorder: Recorder) -> None:
        self._opened = opened
        self._path = path
        self._recorder = recorder
        file = SafetensorsFile(path)
        self._metas = file.tensors
        file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.__exit__(*exception)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        read = FileRead(self._recorder.files, self._path, name, self._metas[name])
        return self._recorder.record_source("a tensor of a file", read, empty_like(read.meta))

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.get_tensor(name) for name in self._opened.keys()}  # noqa: SIM118 - no dict, it has no iterator

    def get_slice(self, name: str) -> _LazySlice:
        return _LazySlice(self._opened.get_slice(name), self, name)


class _LazySlice:
    """What ``get_slice`` returns, with lazy tensors in it."""

    def __init__(self, opened: Any, file: _LazyFile, name: str) -> None:
        self._opened = opened
        self._file = file
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor = self._file.get_tensor(self._name)
        return tensor if index is Ellipsis else tensor[index].clone()
