"""`LazyInitContext`: models built inside have no values until they are boosted or materialized.

What is replaced while a context is open is in this file, too: an initialiser that loops, and what transformers opens
files with.
"""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from booster_core.checkpoint_io import checkpoint_io_class
from booster_core.errors import ConfigError, LazyInitError
from booster_runtime.lazy.files import record_read
from booster_runtime.lazy.recorder import Recorder
from booster_runtime.lazy.tensor import DEVICE, LazyTensor, recorder_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from typing_extensions import Self

_OPEN: list[Recorder] = []
"""The recording of the context that the process is in, if any."""


class LazyInitContext:
    """Builds models without memory: construction is recorded, and done when the model is boosted.

    Inside of the ``with`` block, tensors that a model makes for its parameters and buffers have shapes and no values.
    `Booster.boost`, under any plugin, or `materialize` replays their construction; values and the state of torch's
    random generators are then what they would be without the context, bit for bit. transformers' ``from_pretrained`` of
    a local folder inside of the block records which file each tensor comes from, and reads it then. An optimizer may
    be built from the model's parameters before; ``model.to(dtype)``, tying and further initialisation may follow the
    block.

    What can't be recorded runs at once, with real values, and is counted in ``run_eagerly``.

    Args:
        default_device: Where tensors are made that do not name a device, and drawn; a function is called for it at
            once, such as ``get_current_device``. Torch's default device when ``None``.

    Raises:
        TypeError: If ``default_device`` is no device, name of one, or function that returns one.
        ConfigError: If ``default_device`` is not a device with memory of its own.
        LazyInitError: On entering, if the process is inside of such a context already.
    """

    def __init__(
        self, default_device: torch.device | str | int | Callable[[], torch.device | str | int] | None = None
    ) -> None:
        self.default_device = None if default_device is None else _device_of(default_device)
        self.recorder = Recorder()
        self._stack = ExitStack()

    @property
    def run_eagerly(self) -> dict[str, int]:
        """How often each operation ran at once, with real values, because it could not be recorded."""
        return dict(self.recorder.run_eagerly)

    def __enter__(self) -> Self:
        if _OPEN:
            msg = "`LazyInitContext` is entered inside of another one. One context may hold any number of models."
            raise LazyInitError(msg)
        if not self.recorder.is_open:
            msg = "This `LazyInitContext` was used already. Make a new one for each `with` block."
            raise LazyInitError(msg)
        with ExitStack() as stack:
            _OPEN.append(self.recorder)
            stack.callback(_OPEN.clear)
            stack.enter_context(_recording(self.recorder))
            if self.default_device is not None:
                stack.enter_context(self.default_device)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self.recorder.is_open = False


def _device_of(asked: Any) -> torch.device:
    """Return the device that ``default_device`` stands for."""
    is_function = callable(asked) and not isinstance(asked, (type, nn.Module))
    device = asked() if is_function else asked
    if not isinstance(device, (torch.device, str, int)):
        got = f"a function that returns `{type(device).__name__}`" if is_function else f"`{type(device).__name__}`"
        msg = (
            "`default_device` of LazyInitContext is a device, its name such as 'cpu', or a function that returns one; "
            f"got {got}. Pass `booster.device`, or leave it out."
        )
        raise TypeError(msg)
    try:
        device = torch.device(device)
    except RuntimeError as cause:
        msg = f"`default_device={device!r}` is not a device that torch knows. Use 'cpu' or 'cuda'."
        raise ConfigError(msg) from cause
    if device.type == "meta":
        msg = "`default_device='meta'` has no values to initialise. Leave it out: the model takes no memory."
        raise ConfigError(msg)
    return device


@contextmanager
def continued(model: nn.Module) -> Iterator[None]:
    """Record what is added to a lazy model within the body, as if its context were open; for any other do nothing."""
    recorders = {
        id(tensor.lazy_recorder): tensor.lazy_recorder
        for tensor in model.parameters()
        if isinstance(tensor, LazyTensor)
    }
    if _OPEN or len(recorders) != 1:
        yield
        return
    (recorder,) = recorders.values()
    recorder.is_open = True
    _OPEN.append(recorder)
    try:
        with _recording(recorder):
            yield
    finally:
        _OPEN.clear()
        recorder.is_open = False


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows every operation to the recorder, also those that no lazy tensor takes part in."""

    def __init__(self, recorder: Recorder, files: _RecordedFiles) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._files = files

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._files.replace()  # transformers may have been imported since: it builds models before it opens files
        if func is DEVICE:
            return args[0].lazy_device
        if LazyTensor in types:
            return recorder_of((args, kwargs)).dispatch(func, args, kwargs or {})
        return self._recorder.dispatch(func, args, kwargs or {})


@contextmanager
def _recording(recorder: Recorder) -> Iterator[None]:
    """Record what the body does with tensors."""
    files = _RecordedFiles(recorder)
    files.replace()
    try:
        with _recorded_trunc_normal(recorder), _Mode(recorder, files):
            yield
    finally:
        files.restore()


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


class _RecordedFiles:
    """Lets transformers' ``from_pretrained`` get lazy tensors, until `restore`.

    Other threads open files as ever: what they read is not this context's model.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._owner = threading.get_ident()
        self._modeling: Any = None
        self._original: Any = None

    def replace(self) -> None:
        """Replace ``safe_open`` in transformers' own module, once that is imported."""
        modeling: Any = sys.modules.get("transformers.modeling_utils")
        if self._modeling is None and hasattr(modeling, "safe_open"):
            self._modeling, self._original = modeling, modeling.safe_open
            self._modeling.safe_open = self._open

    def restore(self) -> None:
        """Put the original back."""
        if self._modeling is not None:
            self._modeling.safe_open = self._original

    def _open(self, filename: Any, framework: str = "pt", *args: Any, **kwargs: Any) -> Any:
        opened = self._original(filename, framework, *args, **kwargs)
        device = kwargs.get("device", args[0] if args else "cpu")
        is_torch = framework in ("pt", "torch", "pytorch")
        if threading.get_ident() == self._owner and is_torch and str(device) == "cpu":
            return _LazyFile(opened, Path(filename), self._recorder)
        return opened


class _LazyFile:
    """What ``safe_open`` returns, with lazy tensors in it."""

    def __init__(self, opened: Any, path: Path, recorder: Recorder) -> None:
        self._opened = opened
        self._recorder = recorder
        self._files = checkpoint_io_class().open_model(path.resolve())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.__exit__(*exception)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        return record_read(self._recorder, self._files, name)

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
